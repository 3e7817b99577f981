"""The command line of the programs of this folder, read without a framework."""

import argparse
from pathlib import Path

SIZES = {"layers": 4, "width": 256, "heads": 4, "vocab": 2048, "seq": 256, "batch": 8}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options of both programs."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in SIZES.items():
        made.add_argument(f"--{name}", type=int, default=number, help=f"(default: {number})")
    made.add_argument("--steps", type=int, default=10, help="measured steps (default: 10)")
    made.add_argument("--results", type=Path, required=True, help="file for the figures as JSON")
    return made
