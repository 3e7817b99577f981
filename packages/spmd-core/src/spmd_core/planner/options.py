"""The options of `python -m spmd_core.plan`, read without torch and jax."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from spmd_core import command_line
from spmd_core.config import user_cache
from spmd_core.errors import PlanError
from spmd_core.planner.topology_names import parse

EXIT_USAGE = 2
_OF_ONE = ("steps", "all", "code", "auto")  # options that do not combine with --search


def check_command_line() -> None:
    """Ends this process if it is `spmd-plan` with --help or invalid arguments.

    Or `python -m spmd_core.plan`: call it while `sys.argv[0]` is "-m", as it is until Python has
    imported the module to run.
    """
    if not command_line.is_command("spmd_core.plan"):
        return
    options = parser().parse_args(sys.argv[1:])
    try:
        check(options)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def check(options: argparse.Namespace) -> None:
    """Checks the options before anything is planned.

    Raises:
        PlanError: an option is invalid, or two options exclude each other.
    """
    words_of(options.command)
    parse(options.topology, num_slices=options.slices)
    for text in options.values:
        values_of(text)
    if options.values and not options.search:
        raise PlanError(
            f"--values are for options of --search; got {options.values[0]!r} and no --search. Add "
            f"--search {values_of(options.values[0])[0]}."
        )
    plain = parser()
    of_one = [f"--{name}" for name in _OF_ONE if getattr(options, name) != plain.get_default(name)]
    if options.search and of_one:
        raise PlanError(
            f"--search cannot be combined with {', '.join(of_one)}; got both. Leave out "
            f"{of_one[0]}, or plan one command without --search."
        )
    if options.json is not None and options.json.is_dir():
        raise PlanError(
            f"--json names a file to write; got the folder {str(options.json)!r}. Write for "
            f"instance --json {options.json / 'plan.json'}."
        )


def values_of(text: str) -> tuple[str, list[str]]:
    """An option and its values, from `remat=none;full`.

    Raises:
        PlanError: the text has another form.
    """
    name, equals, values = text.partition("=")
    chosen = [value for value in values.split(";") if value]
    if not (name and equals and chosen):
        raise PlanError(
            f"--values takes an option and its values; got {text!r}. Write for instance "
            "--values 'remat=none;full'."
        )
    return name, chosen


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"this is a whole number of at least 1; got {text!r}. Leave it out for the default"
        )
    return int(text)


def words_of(command: Sequence[str]) -> list[str]:
    """A Python command line without its interpreter.

    Args:
        command: `["python", "-m", "package.module", ...]` or `["python", "script.py", ...]`, with
            or without the interpreter, and with or without `--` before it.

    Raises:
        PlanError: it is neither, or there is no such script or module.
    """
    given = list(command[1:] if command[:1] == ["--"] else command)
    words = list(given)
    if words and Path(words[0]).name.startswith("python"):
        del words[0]
    if len(words) >= 2 and words[0] == "-m":
        if not _is_there(words[1]):
            raise PlanError(
                f"the module to plan must exist; Python finds no {words[1]!r} from {Path.cwd()}. "
                "Correct its name, or run the command in the folder that has it."
            )
        return words
    if words and words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise PlanError(
                f"the script to plan must exist; {words[0]!r} is no file in {Path.cwd()}. "
                "Correct its path."
            )
        return words
    raise PlanError(
        "a plan takes a Python script with its options, after --; got "
        f"{' '.join(given) or 'nothing'!r}. Write for instance: -- python -m examples.gpt2.train "
        "--smoke --mesh fsdp=8"
    )


def _is_there(module: str) -> bool:
    """Whether Python finds a module, by its full name. Imports nothing, not even its packages."""
    names = module.split(".")
    here = [str(Path.cwd()), *sys.path]
    found = PathFinder.find_spec(names[0], here) or importlib.util.find_spec(names[0])
    for end in range(2, len(names) + 1):
        if found is None or found.submodule_search_locations is None:
            return False
        found = PathFinder.find_spec(".".join(names[:end]), found.submodule_search_locations)
    return found is not None


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="spmd-plan",
        allow_abbrev=False,
        description="Plans a training script for devices that need not exist: compiles its "
        "programs and runs none. Prints the memory that they take on each device, their "
        "collectives, and lower bounds on the time of a step.",
        epilog="example: python -m spmd_core.plan --topology v4-16 -- python -m "
        "examples.gpt2.train --preset 4B --mesh fsdp=8",
    )
    options.add_argument(
        "--topology",
        required=True,
        help="v4-8, v4-16, v5e-8, v5p-512, v6e-256, ... as in Google Cloud; v4:2x2x2 as in "
        "libtpu; cpu-64 for emulated devices",
    )
    options.add_argument("--slices", type=_count, default=1, help="TPU slices (default: 1)")
    options.add_argument(
        "--steps",
        type=_count,
        default=3,
        help="the number of steps that update state and compile nothing new after which the plan "
        "is complete (default: 3)",
    )
    options.add_argument(
        "--all",
        action="store_true",
        help="also compiles the programs of training steps that later steps do not repeat, such as "
        "a first step that differs",
    )
    options.add_argument(
        "--code",
        action="store_true",
        help="also generates machine code and counts its bytes; for TPUs this takes several times "
        "as long, and several times as much of the host's memory",
    )
    options.add_argument(
        "--auto",
        action="store_true",
        help="finds shardings for what the script does not mark, as use_spmd(auto=True) does, and "
        "prints them",
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="also writes the plan as JSON")
    options.add_argument(
        "--search",
        metavar="NAMES",
        default="",
        help="plans the command with every combination of values of these options, such as "
        "batch,remat,mesh, and ranks the combinations that fit",
    )
    options.add_argument(
        "--values",
        action="append",
        default=[],
        metavar="NAME=V;V",
        help="the values of one option of --search; by default doublings of the command's batch, "
        "the recipes' values of --remat, and --mesh auto, whose mesh and shardings are found",
    )
    options.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=user_cache() / "plans",
        help="where --search keeps finished plans (default: %(default)s)",
    )
    options.add_argument("command", nargs=argparse.REMAINDER, help="-- python -m module [options]")
    return options
