"""The command line of the programs of this folder, read without a framework."""

import argparse
from pathlib import Path

SIZES = {"layers": 4, "width": 256, "heads": 4, "vocab": 2048, "seq": 256, "batch": 8}


def _count(text: str) -> int:
    # Not that of benchmarks/options.py: other interpreters run these files alone.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"this is a whole number of at least 1; got {text!r}. Write for instance 8"
        )
    return int(text)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of both programs."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in SIZES.items():
        made.add_argument(f"--{name}", type=_count, default=number, help=f"(default: {number})")
    made.add_argument("--steps", type=_count, default=10, help="measured steps (default: 10)")
    made.add_argument("--results", type=Path, required=True, help="file for the figures as JSON")
    return made
