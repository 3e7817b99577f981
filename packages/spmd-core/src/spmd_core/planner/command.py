"""The command `python -m spmd_core.plan`: plans a script with its own command line."""

import argparse
import json
import math
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spmd_core.errors import AutoShardingError, PlanError, PlanReadError
from spmd_core.planner.options import EXIT_USAGE, check, parser, values_of, words_of
from spmd_core.planner.plan import plan
from spmd_core.planner.planned import TopologyPlan
from spmd_core.planner.planned import values as plan_values
from spmd_core.planner.search import Outcome, Request, candidates, search, table
from spmd_core.planner.topology_names import parse

EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_INTERRUPTED = 0, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if everything fits (or the devices are CPUs); 1 if a program does not fit; 2 for invalid
        arguments, and for a script that reads a value before its first step is complete; 130 after
        Ctrl-C.
    """
    options = parser().parse_args(argv)
    try:
        check(options)
        if options.search:
            return _search(options)
        script = script_of(words_of(options.command))
        made = plan(
            script,
            topology=options.topology,
            num_slices=options.slices,
            quiet_steps=options.steps,
            compile_all=options.all,
            machine_code=options.code,
            auto=options.auto,
        )
    except (AutoShardingError, PlanError, PlanReadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        kept = f"; finished plans are in {options.cache}, and the same command goes on"
        print(f"interrupted{kept if options.search else ''}", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(made)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(plan_values(made), indent=1) + "\n")
    return exit_code(made)


def run() -> int:
    """The console script `spmd-plan`."""
    # As Ctrl-C does, SIGTERM then leaves no process of a compiler and no temporary file.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return main()


def _search(options: argparse.Namespace) -> int:
    """Plans every combination and prints the ranking; 1 if none fits."""
    command = words_of(options.command)
    request = Request(options.topology, options.slices, tuple(command), options.cache)
    given = dict(values_of(text) for text in options.values)
    values = candidates(options.search.split(","), given, request)
    num_all = math.prod(len(chosen) for chosen in values.values())
    with _progress_bar(num_all) as advance:

        def report(number: int, count: int, outcome: Outcome) -> None:
            chosen = " ".join(f"{name}={value}" for name, value in outcome.options.items())
            result = outcome.reason or ("fits" if outcome.fits else "does not fit")
            advance(f"[{number}/{count}] {chosen}: {result}")

        outcomes = search(values, request, report=report)
    print(f"Plans for {parse(options.topology, num_slices=options.slices)}; rates are modelled.")
    print(table(outcomes))
    if options.json is not None:
        rows = [{"options": dict(o.options), "reason": o.reason, "plan": o.plan} for o in outcomes]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return EXIT_FITS if any(outcome.fits for outcome in outcomes) else EXIT_DOES_NOT_FIT


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A function that prints a line, and advances a progress bar if tqdm is installed."""
    try:
        from tqdm import tqdm  # noqa: PLC0415  (optional)
    except ImportError:
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    with tqdm(total=total, unit="plan", disable=None, leave=False) as bar:

        def advance(line: str) -> None:
            tqdm.write(line, file=sys.stderr)
            bar.update()

        yield advance


def exit_code(made: TopologyPlan) -> int:
    """The command's exit code for a plan."""
    if made.fits is False:
        return EXIT_DOES_NOT_FIT
    return EXIT_USAGE if made.ended_by else EXIT_FITS


def script_of(words: Sequence[str]) -> Callable[[], None]:
    """A function that runs a Python command line in this process.

    Args:
        words: the command line without the interpreter.
    """
    if words[0] == "-m":
        return lambda: _run(words[1], list(words[1:]), is_module=True)
    return lambda: _run(words[0], list(words), is_module=False)


def _run(name: str, argv: list[str], *, is_module: bool) -> None:
    with _command_line(argv, str(Path.cwd() if is_module else Path(name).resolve().parent)):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise PlanError(
                    f"the planned script must not fail; it ended with {ended.code!r}. Correct what "
                    "it says above."
                ) from ended


@contextmanager
def _command_line(argv: list[str], folder: str) -> Iterator[None]:
    before = sys.argv, list(sys.path)
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
