"""What every figure's file offers: its rows for the settings, and its section of what was found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.published.report import Section
from benchmarks.published.rows import Measured, Row, Settings


@dataclass(frozen=True)
class Figure:
    """One of the published plots.

    Attributes:
        name: for --only.
        rows: what is measured.
        section: what is shown, from the rows that have a result, by name.
    """

    name: str
    rows: Callable[[Settings], list[Row]]
    section: Callable[[Settings, Mapping[str, Measured]], Section]
