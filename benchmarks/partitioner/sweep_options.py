"""The options that the commands of all sweeps have, without a framework: they are read first."""

import argparse

from benchmarks.options import num_jobs, number
from benchmarks.report import argument_parser


def parser_of(doc: str | None, module: str) -> argparse.ArgumentParser:
    """A parser of what `Sweep.main` reads; a sweep's own options are added to it.

    Args:
        doc: the module's docstring.
        module: the module's name.
    """
    parser = argument_parser(doc)
    parser.prog = f"python -m {module}"
    parser.add_argument("--calls", default="*", help="patterns, joined by commas (default all)")
    parser.add_argument("--jobs", type=num_jobs(), default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout", type=number(0.1), default=600, help="limit in seconds of a task (default 600)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run whose journal is there; what failed runs again",
    )
    parser.add_argument("--show", action="store_true", help="print the table, write no files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser
