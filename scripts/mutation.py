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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from faults import FAULTS, Fault
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutation.md"
SOURCES = {"spmd_core": "packages/spmd-core", "spmd_data": "packages/spmd-data"}
LIMIT_S = 3600
# A fault leaves most programs as they were: the copies load those that the tests kept.
COMPILED = ROOT / ".cache" / "compiled_programs"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


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


def first_failure(copy: Path, tier: str, arguments: list[str]) -> str | None:
    """The first test that fails in a copy of the repository; None if all pass.

    A crash, a hang and an error at import count as failures.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "SPMD_TEST_TIER": tier, "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("SPMD_CACHE_DIR", str(COMPILED))
    try:
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode in (0, 5):  # 5: the tier leaves out every test of these paths
        return None
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with code {done.returncode}"


def stages(fault: Fault, copy: Path) -> list[list[str]]:
    """pytest's arguments for the fault's own file, then for its room, then for the rest."""
    package, *inner = fault.file.split("/")
    tests = f"{SOURCES[package]}/tests"
    room = f"{tests}/{inner[0]}" if len(inner) > 1 else tests
    mirror = f"{room}/test_{Path(fault.file).stem}.py"
    found, left_out = [], []
    for path in dict.fromkeys([mirror, room]):
        if (copy / path).exists() and path != tests:
            found.append([path, *left_out])
            left_out.append(f"--ignore={path}")
    return [*found, left_out]


def outcome_of(fault: Fault, copy: Path, *, tier: str) -> Outcome:
    """Plants the fault in a copy, runs the tiers, and takes it back.

    Args:
        fault: what to plant.
        copy: of the repository.
        tier: `room` runs the fast tier's tests of the fault's own room, `fast` all of the fast
            tier, `default` then also the slow tests.
    """
    start = time.monotonic()
    path = copy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
    before = path.read_text()
    path.write_text(planted(before, fault))
    outcome = Outcome(fault)
    steps = stages(fault, copy)
    try:
        for arguments in steps[:-1] if tier == "room" else steps:
            outcome.fast = outcome.fast or first_failure(copy, "fast", arguments)
        for arguments in steps if tier == "default" and outcome.fast is None else []:
            slow = ["-m", "slow", *arguments]
            outcome.default = outcome.default or first_failure(copy, "default", slow)
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
    parser.add_argument(
        "--tier",
        choices=["room", "fast", "default"],
        default="default",
        help="how far to go: the fast tier's tests of the fault's own room, all of the fast tier, "
        "or also the slow tests (default)",
    )
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
                return outcome_of(fault, copy, tier=options.tier)
            finally:
                copies.put(copy)

        outcomes = []
        with ThreadPoolExecutor(options.jobs) as pool:
            running = [pool.submit(run, fault) for fault in chosen]
            for future in tqdm(as_completed(running), total=len(chosen), unit="fault"):
                outcomes.append(outcome := future.result())
                tier = "fast" if outcome.fast else "default" if outcome.default else "NONE"
                test = outcome.fast or outcome.default or ""
                tqdm.write(f"{tier:8}{outcome.seconds:6.0f} s  {outcome.fault.what}  {test}")
                # Written after each, so that an interruption loses nothing.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                ordered = sorted(outcomes, key=lambda o: chosen.index(o.fault))
                options.out.write_text(table(ordered))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
