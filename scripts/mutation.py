"""Plants faults one at a time in a copy of the sources; shows which tier of tests catches each.

A fault is caught when some test fails with it that passes without. Most are caught by a test of
their own module, so tests run in steps, and the first that fails ends them:

1. `module`: the function that caught the fault before, then the tests of its module, fast ones;
2. `folder`: those of its folder, the fast ones, then the slow ones;
3. `reached`: those that run the fault's lines. The default tier runs once under `coverage`, which
   notes the test functions that reach each line, when the first fault comes this far;
4. `all`: the whole fast tier, then the slow tests.

The result is written after each fault. `--resume` leaves out those that it has as caught, so a long
run can be made in parts, with `--only`, and with further steps for what is left.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock

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
STEPS = ("module", "folder", "reached", "all")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Outcome:
    """What the tests said of one fault.

    Attributes:
        fault: which.
        fast: the test of the fast tier that failed, if one did.
        default: the slow test that failed, if no fast one did before.
        seconds: what it took.
    """

    fault: Fault
    fast: str | None = None
    default: str | None = None
    seconds: float = 0.0

    @property
    def test(self) -> str | None:
        """The test that failed, if one did."""
        return self.fast or self.default


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


def pytest_command(*arguments: str) -> list[str]:
    """A quiet run of pytest."""
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def first_failure(copy: Path, tier: str, arguments: Sequence[str]) -> str | None:
    """The first test that fails in a copy of the repository; None if all pass.

    A crash, a hang and an error at import count as failures.

    Raises:
        RuntimeError: something else killed the tests, such as a lack of memory.
    """
    try:
        done = run_pytest(copy, tier, pytest_command("-x", *arguments))
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode in (0, 5):  # 5: the tier leaves out every one of these tests
        return None
    if done.returncode == -signal.SIGKILL:
        raise RuntimeError("the tests were killed, which says nothing of a fault. Use --resume.")
    found = _FAILED.search(done.stdout)
    return found[1] if found else f"pytest ended with code {done.returncode}"


def failing_anyway(tests: Sequence[str], copy: Path) -> list[str]:
    """Those of the tests that fail, or are not found, in a copy of the repository."""
    named = sorted({x for x in tests if x.partition("::")[0].endswith(".py")})
    if not named or not (done := run_pytest(copy, "default", pytest_command(*named))).returncode:
        return []
    failed = [x for x in _FAILED.findall(done.stdout) if x in named]
    return failed or [done.stdout[-3000:] + done.stderr[-3000:]]


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
    print("running the default tier once, to note which tests reach which lines", flush=True)
    coverage = ["-m", "coverage", "run", "--rcfile", str(settings)]
    done = run_pytest(copy, "default", [sys.executable, *coverage, *pytest_command()[1:]])
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
    return sorted(found, key=lambda test: (not test.startswith(folder), test))[:MOST]


def tests_of_module(fault: Fault) -> list[str]:
    """The files of tests that have the module's name."""
    files = sorted((ROOT / _folder(fault)).rglob(f"test_{Path(fault.file).stem}*.py"))
    return [str(path.relative_to(ROOT)) for path in files]


def functions_of(test: str | None) -> list[str]:
    """The function of a test that caught a fault before, if it is still there."""
    file, _, name = (test or "").partition("[")[0].partition("::")
    is_there = bool(name) and (ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text()
    return [f"{file}::{name}"] if is_there else []


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


def steps_of(
    fault: Fault, before: str | None, args: argparse.Namespace, reach: Callable[[], None]
) -> Iterator[tuple[str, list[str]]]:
    """The runs of tests against a fault, in their order: the tier, and pytest's arguments.

    Args:
        fault: what is planted.
        before: the test that caught it in an earlier run.
        args: of `options`.
        reach: makes the map of reached lines.
    """
    chosen = STEPS[: STEPS.index(args.last_step) + 1]
    known = functions_of(before)
    if args.first:
        yield "fast", args.first
        yield "default", ["-m", "slow", *args.first]
    if own := [*known, *tests_of_module(fault)]:
        yield "fast", own
    if "folder" in chosen:
        yield "fast", [_folder(fault)]
        yield "default", ["-m", "slow", *known, _folder(fault)]
    if "reached" in chosen:
        reach()
        if reached := tests_that_reach(fault):
            yield "fast", reached
            yield "default", ["-m", "slow", *reached]
    if "all" in chosen:  # `coverage` notes no test that starts an interpreter
        yield "fast", []
        yield "default", ["-m", "slow"]


def outcome_of(
    fault: Fault, copy: Path, steps: Iterator[tuple[str, list[str]]], *, tier: str
) -> Outcome:
    """Plants the fault in a copy, runs the tests until one fails, and takes it back.

    Args:
        fault: what to plant.
        copy: of the repository.
        steps: of `steps_of`.
        tier: `fast` leaves out the slow tests.
    """
    start = time.monotonic()
    path = copy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
    before = path.read_text()
    path.write_text(planted(before, fault))
    outcome = Outcome(fault)
    try:
        for of, arguments in steps:
            if of == "fast":
                outcome.fast = first_failure(copy, of, arguments)
            elif tier == "default":
                outcome.default = first_failure(copy, of, arguments)
            if outcome.test is not None:
                break
    finally:
        path.write_text(before)
    outcome.seconds = time.monotonic() - start
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """The result as Markdown."""
    fast = sum(o.fast is not None for o in outcomes)
    slow = sum(o.default is not None for o in outcomes)
    lines = [
        "# Faults planted, and the tests that catch them",
        "",
        f"{len(outcomes)} of {len(FAULTS)} faults, one at a time, by `python scripts/mutation.py`. "
        f"A test of the fast tier catches {fast}, a slow test {slow} more; "
        f"{len(outcomes) - fast - slow} are not caught.",
        "",
        "| file | fault | tier | test that fails |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        tier = "fast" if o.fast else "default" if o.default else "none"
        test = (o.test or "").removeprefix("packages/")
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
            if test and (ROOT / "packages" / test.partition("::")[0]).exists():
                test = f"packages/{test}"
            outcome = Outcome(
                fault, **({cells[2]: test} if cells[2] in ("fast", "default") else {})
            )
            found[fault] = outcome
    return found


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only faults whose file or description has this text, or one of several, if it is "
        "given several times; the table's other rows stay",
    )
    parser.add_argument(
        "--tier",
        choices=["fast", "default"],
        default="default",
        help="how far to go: the fast tier, or also the slow tests (default)",
    )
    parser.add_argument(
        "--last-step",
        choices=STEPS,
        default=STEPS[-1],
        help="tests of the fault's module, also of its folder, those that reach its lines, all "
        "(default)",
    )
    parser.add_argument(
        "--first",
        action="append",
        default=[],
        metavar="TESTS",
        help="a file, folder or function of tests to run before these steps, the slow ones, too: "
        "of what should catch the faults in another folder",
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out the faults that the table has as caught"
    )
    parser.add_argument(
        "--anew", action="store_true", help="note anew which tests reach which lines"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default: {RESULT.name}")
    found = parser.parse_args()
    for text in found.only or ():
        if not any(text in f.file or text in f.what for f in FAULTS):
            parser.error(
                "--only is a text of a fault's file or description, such as "
                f"{FAULTS[0].file}; got {text!r}, which no fault has. Correct it."
            )
    if not 1 <= found.jobs <= 64:
        parser.error(f"--jobs must be from 1 to 64; got {found.jobs}. Leave it out for 2.")
    return found


def run(
    chosen: Sequence[Fault],
    known: dict[Fault, Outcome],
    healthy: Path,
    copies: Sequence[Path],
    args: argparse.Namespace,
) -> Iterator[Outcome]:
    """The outcomes of faults as they come.

    Args:
        chosen: the faults.
        known: outcomes of earlier runs.
        healthy: a copy of the repository that stays as it is.
        copies: one for each fault that is planted at a time.
        args: of `options`.
    """
    free: Queue[Path] = Queue()
    for copy in copies:
        free.put(copy)
    once = Lock()

    def reach() -> None:
        with once:
            if not REACHED.exists():
                note_reached_lines(healthy)

    def one(fault: Fault) -> Outcome:
        copy = free.get()
        try:
            before = known[fault].test if fault in known else None
            steps = steps_of(fault, before, args, reach)
            return outcome_of(fault, copy, steps, tier=args.tier)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = [pool.submit(one, fault) for fault in chosen]
        try:
            for future in tqdm(as_completed(running), total=len(chosen), unit="fault"):
                yield future.result()
        finally:
            for future in running:
                future.cancel()


def main() -> None:
    """Runs the faults and writes the table."""
    args = options()
    outcomes = known_outcomes(args.out.read_text()) if args.out.exists() else {}
    words = args.only or [""]
    chosen = asked = [f for f in FAULTS if any(x in f.file or x in f.what for x in words)]
    if args.resume:
        chosen = [f for f in chosen if f not in outcomes or outcomes[f].test is None]
    if args.anew:
        REACHED.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        healthy, *copies = (
            copy_of_the_repository(Path(folder) / str(number)) for number in range(args.jobs + 1)
        )
        for fault in chosen:  # before an hour is spent
            path = healthy / SOURCES[fault.file.split("/")[0]] / "src" / fault.file
            planted(path.read_text(), fault)
        for outcome in run(chosen, outcomes, healthy, copies, args):
            outcomes[outcome.fault] = outcome
            tier = "fast" if outcome.fast else "default" if outcome.default else "NONE"
            tqdm.write(
                f"{tier:8}{outcome.seconds:6.0f} s  {outcome.fault.what}  {outcome.test or ''}"
            )
            # Written after each, so that an interruption loses nothing.
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(table([outcomes[f] for f in FAULTS if f in outcomes]))
        tests = [o.test for f in asked if (o := outcomes.get(f)) and o.test]
        wrong = failing_anyway(tests, healthy)
    print(f"written: {args.out}")
    if wrong:
        sys.exit(
            "a test that catches a fault passes without one; these fail anyway. Mend them, and run "
            "their faults again:\n" + "\n".join(wrong)
        )


if __name__ == "__main__":
    main()
