"""Plants faults one at a time in a copy of the sources; shows which tier of tests catches each.

A fault is caught when some test fails with it. The fast tier's tests are part of the default
tier's, so the default tier runs only where the fast tier let a fault through. For each fault, the
tests of its own room run first, as they mostly tell within seconds; the rest follows.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from faults import FAULTS, Fault
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutation.md"
SOURCES = {"spmd_core": "packages/spmd-core", "spmd_data": "packages/spmd-data"}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Outcome:
    """What the tiers said of one fault.

    Attributes:
        fault: which.
        fast: the first test of the fast tier that failed; None if all passed.
        default: the same of the default tier, where the fast tier passed.
        seconds: what it took.
    """

    fault: Fault
    fast: str | None = None
    default: str | None = None
    seconds: float = 0.0


def copy_of_the_repository(target: Path) -> Path:
    """The tracked and the new files, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def planted(text: str, fault: Fault) -> str:
    """A file's text with the fault in it. Raises ValueError where its place is not found once."""
    if text.count(fault.old) != 1:
        raise ValueError(
            f"a fault's text stands once in its file; got {text.count(fault.old)} places in "
            f"{fault.file} for {fault.what!r}. Write it as the code is now."
        )
    return text.replace(fault.old, fault.new)


def first_failure(
    copy: Path, tier: str, paths: list[str], *extra: str, timeout_s: float
) -> str | None:
    """The first test that fails in a copy of the repository; None if all pass.

    A crash, a hang and an error at import count as failures.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *extra, *paths]
    env = {**os.environ, "SPMD_TEST_TIER": tier, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    if done.returncode in (0, 5):  # 5: the tier leaves out every test of these paths
        return None
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with code {done.returncode}"


def outcome_of(fault: Fault, copy: Path, *, fast_only: bool) -> Outcome:
    """Plants the fault in a copy, runs the tiers, and takes it back."""
    start = time.monotonic()
    package, room = fault.file.split("/")[:2]
    path = copy / SOURCES[package] / "src" / fault.file
    before = path.read_text()
    path.write_text(planted(before, fault))
    tests = copy / SOURCES[package] / "tests"
    own = tests / room if (tests / room).is_dir() else tests
    first, rest = [str(own.relative_to(copy))], [f"--ignore={own.relative_to(copy)}"]
    outcome = Outcome(fault)
    try:
        outcome.fast = first_failure(copy, "fast", first, timeout_s=600)
        outcome.fast = outcome.fast or first_failure(copy, "fast", [], *rest, timeout_s=1800)
        if outcome.fast is None and not fast_only:
            slow = ["-m", "slow"]
            outcome.default = first_failure(copy, "default", first, *slow, timeout_s=1200)
            outcome.default = outcome.default or first_failure(
                copy, "default", [], *rest, *slow, timeout_s=3600
            )
    finally:
        path.write_text(before)
    outcome.seconds = time.monotonic() - start
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """The result as Markdown."""
    fast = sum(o.fast is not None for o in outcomes)
    caught = fast + sum(o.default is not None for o in outcomes)
    share = f" ({fast / caught:.0%} of what the default tier catches)" if caught else ""
    lines = [
        "# Faults planted, and the tests that catch them",
        "",
        f"{len(outcomes)} faults, one at a time, by `python scripts/mutation.py`. "
        f"The fast tier catches {fast}{share}, the default tier {caught}.",
        "",
        "| file | fault | tier | first test that fails |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        tier = "fast" if o.fast else "default" if o.default else "none"
        test = (o.fast or o.default or "").removeprefix("packages/")
        lines.append(f"| {o.fault.file} | {o.fault.what} | {tier} | `{test}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the faults and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="faults whose file or description has this text")
    parser.add_argument("--fast-only", action="store_true", help="leave the default tier out")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default: {RESULT.name}")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if options.only in f.file or options.only in f.what]
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copies.put(copy_of_the_repository(Path(folder) / str(number)))
        healthy = copies.get()
        for fault in chosen:  # before an hour is spent
            path = healthy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
            planted(path.read_text(), fault)
        copies.put(healthy)

        def run(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return outcome_of(fault, copy, fast_only=options.fast_only)
            finally:
                copies.put(copy)

        outcomes = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in tqdm(pool.map(run, chosen), total=len(chosen), unit="fault"):
                outcomes.append(outcome)
                tier = "fast" if outcome.fast else "default" if outcome.default else "NONE"
                test = outcome.fast or outcome.default or ""
                tqdm.write(f"{tier:8}{outcome.seconds:6.0f} s  {outcome.fault.what}  {test}")
                # Written after each, so that an interruption loses nothing.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(table(outcomes))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
