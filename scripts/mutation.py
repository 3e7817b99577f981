"""Plants faults one at a time in a copy of the sources; shows which tier of tests catches each.

A fault is caught when some test fails with it. The fast tier's tests are part of the default
tier's, so the default tier runs only where the fast tier let a fault through.

A test that never runs a fault's lines mostly cannot catch it. So the default tier runs once under
`coverage`, which notes the test functions that reach each line. For a fault, these tests run first:
those of its own file, of its own folder, then the others. Where none of these fails, all tests of
its folder run, then the whole tier.
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

from coverage import CoverageData
from faults import FAULTS, Fault
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutation.md"
SOURCES = {"spmd_core": "packages/spmd-core", "spmd_data": "packages/spmd-data"}
LIMIT_S = 7200
# A fault leaves most programs as they were: the copies load those that the tests kept.
COMPILED = ROOT / ".cache" / "compiled_programs"
REACHED = ROOT / ".cache" / "reached_lines"
# A fault that more test functions than this reach is caught by the first of them, or by none.
MOST = 600
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


def run_pytest(copy: Path, tier: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a copy of the repository, with the tier's settings."""
    env = {**os.environ, "SPMD_TEST_TIER": tier, "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("SPMD_CACHE_DIR", str(COMPILED))
    return subprocess.run(
        command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def first_failure(copy: Path, tier: str, arguments: list[str]) -> str | None:
    """The first test that fails in a copy of the repository; None if all pass.

    A crash, a hang and an error at import count as failures.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = run_pytest(copy, tier, command)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode in (0, 5):  # 5: the tier leaves out every one of these tests
        return None
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with code {done.returncode}"


def note_reached_lines(copy: Path) -> None:
    """Runs the default tier in a copy under `coverage`, which names each line's test functions.

    Raises RuntimeError where a test fails: the tests must pass before a fault can be caught.
    """
    settings = copy / ".coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {REACHED}\ndynamic_context = test_function\n"
        f"include = {copy}/packages/*/src/*\n[paths]\nsources = \n  {ROOT}\n  {copy}\n"
    )
    REACHED.parent.mkdir(parents=True, exist_ok=True)
    coverage = [sys.executable, "-m", "coverage", "run", "--rcfile", str(settings), "-m", "pytest"]
    done = run_pytest(copy, "default", [*coverage, "-q", "-p", "no:cacheprovider"])
    if done.returncode:
        REACHED.unlink(missing_ok=True)
        raise RuntimeError(
            f"the tests pass before a fault is planted; they ended with code {done.returncode}. "
            f"Mend this first:\n{done.stdout[-3000:]}"
        )


def tests_that_reach(fault: Fault) -> list[str]:
    """The test functions that run a line of the fault: of its file, of its folder, then others."""
    data = CoverageData(str(REACHED))
    data.read()
    source = SOURCES[fault.file.split("/")[0]]
    lines = planted_lines((ROOT / source / "src" / fault.file).read_text(), fault)
    (measured,) = (f for f in data.measured_files() if f.endswith(f"{source}/src/{fault.file}"))
    contexts = data.contexts_by_lineno(measured)
    functions = {name for line in lines for name in contexts.get(line, ()) if name}
    found = {path for name in functions if (path := _node(name))}
    folder = _folder(fault)
    mirror = f"{folder}test_{Path(fault.file).stem}.py"
    rank = lambda test: (not test.startswith(mirror), not test.startswith(folder), test)  # noqa: E731
    return sorted(found, key=rank)[:MOST]


def _folder(fault: Fault) -> str:
    """The tests of the fault's folder."""
    package, *inner = fault.file.split("/")
    return f"{SOURCES[package]}/tests/" + (f"{inner[0]}/" if len(inner) > 1 else "")


def _node(context: str) -> str | None:
    """pytest's id of a test function, from its dotted name."""
    module, function = context.rsplit(".", 1)
    path = module.replace(".", "/") + ".py"
    return f"{path}::{function}" if (ROOT / path).exists() else None


def planted_lines(text: str, fault: Fault) -> range:
    """The numbers of the lines that the fault changes."""
    start = text.index(fault.old)
    first = text.count("\n", 0, start) + 1
    return range(first, first + fault.old.count("\n") + 1)


def outcome_of(fault: Fault, copy: Path, *, tier: str, reached_only: bool) -> Outcome:
    """Plants the fault in a copy, runs the tiers, and takes it back.

    Args:
        fault: what to plant.
        copy: of the repository.
        tier: `fast` runs the fast tier, `default` then also the slow tests.
        reached_only: whether to stop after the tests that reach the fault's lines.
    """
    start = time.monotonic()
    path = copy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
    before = path.read_text()
    path.write_text(planted(before, fault))
    outcome = Outcome(fault)
    reached = tests_that_reach(fault)
    try:
        if reached:
            outcome.fast = first_failure(copy, "fast", reached)
            if outcome.fast is None and tier == "default":
                outcome.default = first_failure(copy, "default", ["-m", "slow", *reached])
        # `coverage` notes no test that starts an interpreter, and misses some others.
        for rest in ([_folder(fault)],) if reached_only else ([_folder(fault)], []):
            if outcome.fast is None and outcome.default is None:
                outcome.fast = first_failure(copy, "fast", rest)
                if outcome.fast is None and tier == "default":
                    outcome.default = first_failure(copy, "default", ["-m", "slow", *rest])
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


def known_outcomes(text: str) -> dict[Fault, Outcome]:
    """The outcomes of the faults in a table that an earlier run wrote."""
    by_name = {(fault.file, fault.what): fault for fault in FAULTS}
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and (fault := by_name.get((cells[0], cells[1]))):
            test = cells[3].strip("`") or None
            outcome = Outcome(
                fault, **({cells[2]: test} if cells[2] in ("fast", "default") else {})
            )
            found[fault] = outcome
    return found


def main() -> None:
    """Runs the faults and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        default="",
        help="only faults whose file or description has this text; the table's other rows stay",
    )
    parser.add_argument(
        "--tier",
        choices=["fast", "default"],
        default="default",
        help="how far to go: the fast tier, or also the slow tests (default)",
    )
    parser.add_argument(
        "--reached-only",
        action="store_true",
        help="stop after the tests that reach the fault's lines and those of its folder",
    )
    parser.add_argument(
        "--anew", action="store_true", help="note anew which tests reach which lines"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default: {RESULT.name}")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if options.only in f.file or options.only in f.what]
    if not chosen:
        parser.error(
            "--only is a text of a fault's file or description, such as "
            f"{FAULTS[0].file}; got {options.only!r}, which no fault has. Correct it."
        )
    if not 1 <= options.jobs <= 64:
        parser.error(f"--jobs must be from 1 to 64; got {options.jobs}. Leave it out for 2.")
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for number in range(options.jobs):
            copies.put(copy_of_the_repository(Path(folder) / str(number)))
        healthy = copies.get()
        if options.anew or not REACHED.exists():
            print(
                "running the default tier once, to note which tests reach which lines", flush=True
            )
            note_reached_lines(healthy)
        for fault in chosen:  # before an hour is spent
            path = healthy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
            planted(path.read_text(), fault)
        copies.put(healthy)

        def run(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return outcome_of(fault, copy, tier=options.tier, reached_only=options.reached_only)
            finally:
                copies.put(copy)

        # With --only, the other rows stay.
        outcomes = known_outcomes(options.out.read_text()) if options.out.exists() else {}
        with ThreadPoolExecutor(options.jobs) as pool:
            running = [pool.submit(run, fault) for fault in chosen]
            for future in tqdm(as_completed(running), total=len(chosen), unit="fault"):
                outcome = future.result()
                outcomes[outcome.fault] = outcome
                tier = "fast" if outcome.fast else "default" if outcome.default else "NONE"
                test = outcome.fast or outcome.default or ""
                tqdm.write(f"{tier:8}{outcome.seconds:6.0f} s  {outcome.fault.what}  {test}")
                # Written after each, so that an interruption loses nothing.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(table([outcomes[f] for f in FAULTS if f in outcomes]))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
