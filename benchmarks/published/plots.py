"""Draws the plots: measured points with their spread, and the published figures as marks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.published.rows import Quantity

# Of the variants of a plot, in their order; they stay apart for readers who see fewer colors.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d1f", "#666666")
MARKERS = "osD^vPX"
PUBLISHED = "#c1121f"
PNG_DPI = 120

Point = tuple[float, Quantity]


def save(draw: Callable[[Any], None], path: Path, *, size: tuple[float, float]) -> None:
    """Writes `path`.png and `path`.svg.

    Args:
        draw: fills an empty matplotlib figure.
        path: without a suffix; its folder is made.
        size: in inches.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same figures give the same file: no date, and ids that do not depend on the process.
    with matplotlib.rc_context({"svg.hashsalt": "published", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)  # files only: there may be no display
        draw(figure)
        figure.savefig(path.with_suffix(".png"), dpi=PNG_DPI)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def curves(axes: Any, series: Mapping[str, Sequence[Point]], *, scale: float = 1.0) -> None:
    """Points joined by lines, one color for each series, with bars over all samples.

    Args:
        axes: of matplotlib.
        series: points by label; an empty one takes its color and is not drawn.
        scale: what the values are multiplied by, such as 1e3 for milliseconds.
    """
    for i, (label, points) in enumerate(series.items()):
        if not points:
            continue
        points = sorted(points, key=lambda point: point[0])
        axes.errorbar(
            [x for x, _ in points],
            [q.median * scale for _, q in points],
            yerr=_reach([q for _, q in points], scale),
            label=label,
            color=COLORS[i % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            capsize=3,
        )


def published(axes: Any, x: float, y: float, label: str) -> None:
    """A published figure as a star."""
    axes.plot([x], [y], "*", color=PUBLISHED, markersize=15, label=label, linestyle="none")


def bars(axes: Any, values: Mapping[str, Quantity], *, scale: float = 1.0) -> None:
    """One horizontal bar for each name, from the top down, with bars over all samples."""
    names = list(values)
    axes.barh(
        names,
        [values[name].median * scale for name in names],
        xerr=_reach(list(values.values()), scale),
        color=[COLORS[i % len(COLORS)] for i in range(len(names))],
        height=0.6,
        capsize=3,
    )
    axes.invert_yaxis()


def _reach(quantities: Sequence[Quantity], scale: float) -> tuple[list[float], list[float]]:
    """How far the samples reach below and above their median."""
    below = [(q.median - min(q.samples)) * scale for q in quantities]
    return below, [(max(q.samples) - q.median) * scale for q in quantities]


def bytes_text(num_bytes: float) -> str:
    """Bytes in the unit that suits them: 2.4 MB, 26.0 GB.

    Example:
        >>> bytes_text(2_400_000), bytes_text(26e9), bytes_text(0)
        ('2.4 MB', '26.0 GB', '0.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def text(quantity: Quantity | None, form: str, scale: float = 1.0) -> str:
    """Median and spread as "12.3 ± 0.4"; "-" where nothing was measured.

    Args:
        quantity: what was measured.
        form: a number's format, such as ",.1f".
        scale: what it is multiplied by.
    """
    if quantity is None:
        return "-"
    median = format(quantity.median * scale, form)
    spread = quantity.spread * scale
    return f"{median} ± {format(spread, form)}" if spread else median
