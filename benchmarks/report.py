"""Shows a benchmark's table on the console and writes it as JSON and Markdown."""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks import index
from benchmarks.environment import environment

RESULTS = index.RESULTS


@dataclass(frozen=True)
class Table:
    """Rows of text under column names, with explaining notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        lines = [
            f"# {self.title}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + "---|" * len(self.columns),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])

    def show(self) -> None:
        """Prints the table."""
        table = RichTable(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        if not console.is_terminal:  # rich assumes a width of 80 characters there, and folds cells
            console = Console(width=max(150, Console(width=10_000).measure(table).maximum))
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity, in seconds."""

    values: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Adds one measurement."""
        self.values.append(seconds)

    @property
    def median(self) -> float:
        """The middle measurement."""
        return statistics.median(self.values)

    @property
    def min(self) -> float:
        """The least disturbed measurement."""
        return min(self.values)


class Stopwatch:
    """Wall time and CPU time of a block; CPU time counts all threads of the process, XLA's too.

    Example:
        >>> with Stopwatch() as watch:
        ...     total = sum(range(1000))
        >>> watch.wall_s > 0 and watch.cpu_s >= 0
        True
    """

    wall_s: float
    cpu_s: float

    def __enter__(self) -> "Stopwatch":
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu


def publish(name: str, table: Table, data: Mapping[str, Any], *, folder: Path = RESULTS) -> None:
    """Prints the table and writes it into `folder`.

    `name.json` holds the data and the environment, `name.md` the table, and README.md the list of
    all results there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        json.dumps({"environment": environment(), **data}, indent=1) + "\n"
    )
    (folder / f"{name}.md").write_text(table.markdown())
    index.write(folder)
    table.show()
    print(f"written: {folder / name}.json, {folder / name}.md")


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with `--out`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder for the JSON and Markdown results (default: benchmarks/results)",
    )
    return parser


def verdict(holds: bool) -> str:
    """The text in a table for whether a target is reached."""
    return "yes" if holds else "NO"
