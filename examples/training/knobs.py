"""A recipe's options: a dataclass with a help line for each field, and the command line from it."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from examples.training.collector import begin_imports

Config = TypeVar("Config")
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_MOST = 2**63 - 1  # of int64, the integers of the programs


class UsageError(ValueError):
    """What a command was given cannot work, such as options, data or a saved run.

    The command prints it as a line, and exits with code 2.
    """


class KnobError(UsageError):
    """An option is out of range, or two options do not fit together."""


def knob(
    default: Any,
    text: str,
    *,
    resumable: bool = False,
    least: float = 0,
    most: float = _MOST,
    **argument: Any,
) -> Any:
    """A field of a recipe's configuration.

    Args:
        default: its value where the command line does not name it.
        text: the line that --help prints.
        least, most: the range of a number, which `check_ranges` checks.
        resumable: whether a resumed run may have another value: the option decides where or how
            fast the run is computed, or what it writes, and not what it computes.
        argument: more arguments of `ArgumentParser.add_argument`.
    """
    options = {"help": text, "type": type(default), **argument}
    metadata = {"options": options, "resumable": resumable, "range": (least, most)}
    return dataclasses.field(default=default, metadata=metadata)


def option(name: str) -> str:
    """The option of a field: "--log-dir" for "log_dir"."""
    return f"--{name.replace('_', '-')}"


def parser_of(config_type: type, *, module: str, usage: str | None) -> argparse.ArgumentParser:
    """A parser with an option for each field of a configuration made of knobs.

    --help lists the fields of the class itself before those that it inherits.

    Args:
        config_type: a dataclass whose fields are `knob`s.
        module: what `python -m` runs.
        usage: a module's docstring; stands on top of --help, up to the legend of its letters.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=(usage or "").partition("Legend:")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own = config_type.__annotations__
    for field in sorted(dataclasses.fields(config_type), key=lambda field: field.name not in own):
        options = {k: v for k, v in field.metadata["options"].items() if v is not bool}
        shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        default = "" if field.default in (None, "") else f" (default: {shown})"
        options["help"] += default
        parser.add_argument(option(field.name), default=field.default, **options)
    return parser


def add_smoke(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    """Adds --smoke, which changes the defaults of other options to `values`."""
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    parser.add_argument("--smoke", action="store_true", help=f"a run that takes seconds: {text}")


def parse(
    parser: argparse.ArgumentParser,
    config_type: type[Config],
    argv: Sequence[str] | None,
    *,
    smoke: Mapping[str, Any],
) -> Config:
    """The command line as a configuration; --smoke only changes defaults of other options.

    Options of the parser that are no field of the configuration are left out.
    """
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**smoke)
    values = vars(parser.parse_args(argv))
    names = {field.name for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    return config_type(**{name: value for name, value in values.items() if name in names})


def begin_command(read: Callable[[], object]) -> None:
    """What a command does before its slow imports, under `if __name__ == "__main__":`.

    It ends the process for --help and for options that cannot work, as the command itself would;
    these options are read again when it runs. From here to `exit_code`, no garbage is collected.

    Args:
        read: reads and checks the options of this process's command line.
    """
    try:
        read()
    except KnobError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    begin_imports()


def check_ranges(config: Any) -> None:
    """Checks that each number is finite and in its knob's range.

    Raises:
        KnobError: one is not.
    """
    for field in dataclasses.fields(config):
        if type(field.default) not in (int, float):
            continue
        value, (least, most) = getattr(config, field.name), field.metadata["range"]
        rule = None
        if not math.isfinite(value):
            rule = "a number that is finite"
        elif value < least:
            rule = f"at least {least}"
        elif value > most:
            rule = f"at most {most}"
        if rule is not None:
            raise KnobError(
                f"{option(field.name)} must be {rule}; got {value}. Leave it out for the default."
            )


def nearest_multiple(number: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `number`.

    Example:
        >>> nearest_multiple(8, 3), nearest_multiple(1, 3)
        (9, 3)
    """
    return max(1, round(number / of)) * of
