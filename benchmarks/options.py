"""Types of command-line options, whose errors say the rule, what was got, and what to write."""

import argparse
import fnmatch
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

from examples.training.choices import MOST_DEVICES, MOST_WORKERS


def whole(least: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number in a range, as a `type` of `ArgumentParser.add_argument`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            is_high = number is not None and number > most
            is_open = most == 2**31 - 1 and not is_high
            limits = f"of at least {least}" if is_open else f"from {least} to {most}"
            example = min(max(least, 8), most)
            raise argparse.ArgumentTypeError(
                f"this is a whole number {limits}; got {text!r}. Write for instance {example}"
            )
        return number

    return read


def num_devices(least: int = 1) -> Callable[[str], int]:
    """A number of emulated devices."""
    return whole(least, MOST_DEVICES)


def num_jobs() -> Callable[[str], int]:
    """A number of worker processes."""
    return whole(1, MOST_WORKERS)


def num_layers() -> Callable[[str], int]:
    """A number of a model's layers."""
    return whole(1, 1000)


def number(least: float = 0.0) -> Callable[[str], float]:
    """A finite number of at least `least`."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found < math.inf:
            raise argparse.ArgumentTypeError(
                f"this is a number of at least {least:g}; got {text!r}. Write for instance "
                f"{max(least, 1):g}"
            )
        return found

    return read


def mesh_shape(*numbers_of_axes: int) -> Callable[[str], str]:
    """The sizes of a mesh's axes as a text, such as "2,2", over at most 8 devices."""
    counts = " or ".join(map(str, numbers_of_axes))
    example = ",".join(["2"] * numbers_of_axes[-1])

    def read(text: str) -> str:
        sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
        if len(sizes) not in numbers_of_axes or not 1 <= math.prod(sizes) <= 8:
            raise argparse.ArgumentTypeError(
                f"this is the sizes of {counts} axes with commas between them, of 1 to 8 devices "
                f"together; got {text!r}. Write for instance {example}"
            )
        return text

    return read


def _end(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_names(option: str, given: Iterable[str], known: Collection[str]) -> None:
    """Ends the command if a name is not known."""
    unknown = [name for name in given if name not in known]
    if unknown:
        _end(f"{option} is of {', '.join(known)}; got {unknown[0]!r}. Correct it.")


def part(text: str) -> tuple[int, int]:
    """A part of all, such as 0/2 for the first half."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(
            f"this is a part's number and how many parts there are; got {text!r}. Write for "
            "instance 0/2 and 1/2"
        )
    return int(first), int(count)


def selected(option: str, patterns: str, known: Iterable[str]) -> list[str]:
    """The names that match one of the patterns, in their order; ends the command if none does.

    Args:
        option: the patterns' own, such as "--ops".
        patterns: as for `fnmatch`, with commas between them. Each must match a name.
        known: the names.
    """
    known = [*known]
    chosen: set[str] = set()
    for pattern in patterns.split(","):
        found = fnmatch.filter(known, pattern)
        if not found:
            _end(
                f"{option} has patterns of names, such as {known[0]}, each of which matches one; "
                f"got {pattern!r}. Correct it, or leave it out."
            )
        chosen.update(found)
    return [name for name in known if name in chosen]


def interpreter(text: str) -> str:
    """A Python interpreter that can be run."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(
            f"this is a Python interpreter; {text!r} cannot be run. Write for instance "
            "venv/bin/python"
        )
    return text


def existing(kind: str) -> Callable[[str], Path]:
    """A path at which there is a file or a folder.

    Args:
        kind: "file" or "folder".
    """

    def read(text: str) -> Path:
        path = Path(text)
        if not (path.is_dir() if kind == "folder" else path.is_file()):
            raise argparse.ArgumentTypeError(
                f"this is a {kind} that exists; {text!r} is none in {Path.cwd()}. Correct its path"
            )
        return path

    return read


def new_file(text: str) -> Path:
    """The path of a file to write, whose folder exists."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(
            f"this is a file to write, in a folder that exists; got {text!r}. Make the folder, or "
            "correct the path"
        )
    return path
