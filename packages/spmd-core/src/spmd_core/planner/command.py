"""The command `python -m spmd_core.plan`: plans a script with its own command line."""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spmd_core.errors import PlanError
from spmd_core.planner.plan import plan
from spmd_core.planner.planned import Plan, values

EXIT_FITS, EXIT_DOES_NOT_FIT, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 if everything fits (or the devices are CPUs); 1 if a program does not fit; 2 for arguments
        that cannot work, and for a script that reads a value before its first step is complete.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        script = script_of(options.command)
        made = plan(
            script, topology=options.topology, num_slices=options.slices, quiet_steps=options.steps
        )
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(made)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(values(made), indent=1) + "\n")
    return exit_code(made)


def exit_code(made: Plan) -> int:
    """The command's exit code for a plan."""
    if made.fits is False:
        return EXIT_DOES_NOT_FIT
    return EXIT_USAGE if made.ended_by else EXIT_FITS


def script_of(command: Sequence[str]) -> Callable[[], None]:
    """A function that runs a Python command line in this process.

    Args:
        command: `["python", "-m", "package.module", ...]` or `["python", "script.py", ...]`, with
            or without the interpreter.

    Raises:
        PlanError: it is neither.
    """
    words = list(command)
    if words and words[0] == "--":
        del words[0]
    if words and Path(words[0]).name.startswith("python"):
        del words[0]
    if len(words) >= 2 and words[0] == "-m":
        return lambda: _run(words[1], words[1:], is_module=True)
    if words and words[0].endswith(".py") and Path(words[0]).is_file():
        return lambda: _run(words[0], words, is_module=False)
    raise PlanError(
        "what is planned is a Python script with its options, behind --; got "
        f"{' '.join(command) or 'nothing'!r}. Write for instance: -- python -m examples.gpt2.train "
        "--smoke"
    )


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spmd_core.plan",
        description="Plans a training script for devices that are not there: compiles its programs "
        "and runs none. Prints what they take of each device's memory, what moves between devices, "
        "and bounds on the time of a step.",
        epilog="example: python -m spmd_core.plan --topology v4-16 -- python -m "
        "examples.gpt2.train --preset 4B --mesh fsdp=8",
    )
    parser.add_argument(
        "--topology",
        required=True,
        help="v4-8, v4-16, v5e-8, v5p-512, v6e-256, ... as Google Cloud names them; v4:2x2x2 as "
        "libtpu does; cpu-64 for emulated devices",
    )
    parser.add_argument("--slices", type=int, default=1, help="TPU slices (default: 1)")
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="steps that compile nothing new after which the plan is complete (default: 3)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes the plan as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- python -m module [options]")
    return parser
