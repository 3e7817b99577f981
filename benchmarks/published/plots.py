"""Draws the plots: measured points with their intervals, and the published figures as marks."""

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
FEWEST_OF_A_LINE = 3  # points; a line through two claims a law that nobody measured

Point = tuple[float, Quantity]


def save(
    draw: Callable[[Any], None],
    path: Path,
    *,
    size: tuple[float, float],
    kinds: Sequence[str] = ("png", "svg"),
) -> None:
    """Writes `path`.png and `path`.svg.

    Args:
        draw: fills an empty matplotlib figure.
        path: without a suffix; its folder is made.
        size: in inches.
        kinds: the files' suffixes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same figures give the same file: no date, and ids that do not depend on the process.
    with matplotlib.rc_context({"svg.hashsalt": "published", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)  # files only: there may be no display
        draw(figure)
        for kind in kinds:
            # An SVG file would have the date.
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(path.with_suffix(f".{kind}"), dpi=PNG_DPI, metadata=metadata)


def curves(axes: Any, series: Mapping[str, Sequence[Point]], *, scale: float = 1.0) -> None:
    """Points joined by lines, one color for each series, with bars over their intervals.

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
            yerr=_intervals([q for _, q in points], scale),
            label=label,
            color=COLORS[i % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            capsize=3,
        )


def over_sizes(
    axes: Any,
    series: Mapping[str, Mapping[str, Quantity]],
    sizes: Mapping[str, float],
    *,
    scale: float = 1.0,
) -> None:
    """Quantities of models: lines over their sizes, or bars side by side for fewer than three.

    Args:
        axes: of matplotlib.
        series: by label and model; an empty one takes its color and is not drawn.
        sizes: the models' parameters, by name.
        scale: what the values are multiplied by.
    """
    if len(sizes) >= FEWEST_OF_A_LINE:
        points = {
            label: [(sizes[model], quantity) for model, quantity in of.items() if model in sizes]
            for label, of in series.items()
        }
        curves(axes, points, scale=scale)
        axes.set(xlabel="parameters", xscale="log")
        axes.grid(alpha=0.3)
        return
    models = sorted(sizes, key=sizes.__getitem__)
    width = 0.8 / max(len(series), 1)
    for i, (label, of) in enumerate(series.items()):
        shown = [model for model in models if model in of]
        if not shown:
            continue
        axes.bar(
            [models.index(model) + (i + 0.5) * width - 0.4 for model in shown],
            [of[model].median * scale for model in shown],
            width * 0.9,
            yerr=_intervals([of[model] for model in shown], scale),
            label=label,
            color=COLORS[i % len(COLORS)],
            capsize=2,
        )
    axes.set_xticks(range(len(models)), [f"{model}\n{sizes[model] / 1e6:.3g}M" for model in models])
    axes.grid(axis="y", alpha=0.3)


def published(axes: Any, x: float, y: float, label: str) -> None:
    """A published figure as a star."""
    axes.plot([x], [y], "*", color=PUBLISHED, markersize=15, label=label, linestyle="none")


def bars(axes: Any, values: Mapping[str, Quantity], *, scale: float = 1.0) -> None:
    """One horizontal bar for each name, from the top down, with bars over their intervals."""
    names = list(values)
    axes.barh(
        names,
        [values[name].median * scale for name in names],
        xerr=_intervals(list(values.values()), scale),
        color=[COLORS[i % len(COLORS)] for i in range(len(names))],
        height=0.6,
        capsize=3,
    )
    axes.invert_yaxis()


def _intervals(quantities: Sequence[Quantity], scale: float) -> list[float]:
    """The same intervals as in the tables, in the plot's unit."""
    return [q.interval * scale for q in quantities]


def bytes_text(num_bytes: float) -> str:
    """Bytes in the unit that suits them: 2.4 MB, 26.0 GB.

    Example:
        >>> bytes_text(2_400_000), bytes_text(26e9), bytes_text(0)
        ('2.4 MB', '26.0 GB', '0.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def text(quantity: Quantity | None, form: str, scale: float = 1.0) -> str:
    """Median and interval as "12.3 ± 0.4" without a break; "-" where nothing was measured.

    Args:
        quantity: what was measured.
        form: a number's format, such as ",.1f".
        scale: what it is multiplied by.
    """
    if quantity is None:
        return "-"
    median = format(quantity.median * scale, form)
    interval = quantity.interval * scale
    return f"{median}\u00a0±\u00a0{format(interval, form)}" if interval else median
