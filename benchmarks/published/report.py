"""Turns sections into `report.md` and a `report.html` of one file, with figures as PNG and SVG."""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from benchmarks.published import plots
from benchmarks.published.rows import Measured
from benchmarks.report import Table


@dataclass(frozen=True)
class Comparison:
    """A published figure beside ours, and why they differ."""

    what: str
    published: str
    measured: str
    reason: str


@dataclass(frozen=True)
class Picture:
    """A plot: its file's name, its caption, and what draws it on a matplotlib figure."""

    name: str
    caption: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (12.0, 4.2)


@dataclass(frozen=True)
class Section:
    """What a figure shows.

    Attributes:
        title: its heading.
        question: what it answers, in a sentence or two.
        columns, lines: of its table.
        notes: what must be known to read it.
        comparisons: with what is published.
        pictures: its plots.
    """

    title: str
    question: str
    columns: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    comparisons: Sequence[Comparison] = ()
    pictures: Sequence[Picture] = field(default_factory=tuple)

    def table(self) -> Table:
        """The section's table, for the console."""
        return Table(self.title, self.columns, self.lines, self.notes)


def write(
    folder: Path, sections: Sequence[Section], rows: Sequence[Measured], *, command: str
) -> None:
    """Writes report.md, report.html and the plots into `folder`.

    Args:
        folder: of the results.
        sections: in their order.
        rows: of all sections, with those that failed.
        command: what wrote it.
    """
    draw(folder, sections)
    text = markdown(sections, rows, command=command)
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(html(text, folder))


def draw(folder: Path, sections: Sequence[Section]) -> None:
    """Writes the sections' plots into `folder`."""
    for section in sections:
        for picture in section.pictures:
            plots.save(picture.draw, folder / picture.name, size=picture.size)


def markdown(sections: Sequence[Section], rows: Sequence[Measured], *, command: str) -> str:
    """The report in GitHub's Markdown; its pictures are in the same folder."""
    lines = ["# The published plots, measured again", "", *_head(rows, command), ""]
    for section in sections:
        lines += [f"## {section.title}", "", section.question, ""]
        for picture in section.pictures:
            lines += [f"![{picture.caption}]({picture.name}.png)", "", f"*{picture.caption}*", ""]
        if section.lines:
            lines += [*_table(section.columns, section.lines), ""]
        lines += [line for note in section.notes for line in (note, "")]
        if section.comparisons:
            cells = [(c.what, c.published, c.measured, c.reason) for c in section.comparisons]
            columns = ("Beside what is published", "published", "here", "why they differ")
            lines += [*_table(columns, cells), ""]
    lines += _failed(rows)
    lines += ["## Commands", "", *_commands(rows)]
    return "\n".join(lines) + "\n"


def html(text: str, folder: Path) -> str:
    """A page of one file: the Markdown, with its pictures inside."""

    def inside(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'src="([^":]+\.png)"', inside, body)
    return _PAGE.replace("BODY", body)


def _head(rows: Sequence[Measured], command: str) -> list[str]:
    """Where the rows were measured: usually one place."""
    places = list(dict.fromkeys(_place(row) for row in rows))
    drift = max((row.drift for row in rows), default=0.0)
    lines = [f"Written by `{command}`.", ""]
    lines += [f"- {place}" for place in places]
    return [
        *lines,
        "",
        "Figures are medians. Behind ± stands half the width of the 95% interval of the samples' "
        "mean, where few samples borrow from the variance of others; the plots' bars are the same. "
        f"Between the runs the machine's own speed moved by {drift:.1%} (a standard deviation, by "
        "a fixed job): times of two rows that lie further apart than their intervals may differ by "
        "that alone. Ratios are of runs that took turns, round by round, so that it cancels, and "
        "have an interval of their own. `results.json` has every sample.",
    ]


def _place(row: Measured) -> str:
    hardware, versions = row.hardware, row.versions
    memory = f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    chip = hardware["accelerator"] or f"{hardware['cpu']}, {hardware['cores']} cores, {memory}"
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{chip}; commit {row.commit}; {names}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*head, *("| " + " | ".join(line) + " |" for line in lines)]


def _failed(rows: Sequence[Measured]) -> list[str]:
    failed = [row for row in rows if row.status == "failed"]
    if not failed:
        return []
    lines = ["## Rows that failed", ""]
    for row in failed:
        lines += [f"**{row.figure}, {row.name}**", "", "```", row.reason, "```", ""]
    return lines


def _commands(rows: Sequence[Measured]) -> list[str]:
    lines = ["```"]
    lines += [f"# {row.figure}, {row.name}\npython {_quoted(row.command)}" for row in rows]
    return [*lines, "```"]


def _quoted(command: Sequence[str]) -> str:
    return " ".join(word if word and " " not in word else f'"{word}"' for word in command)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The published plots, measured again</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2430; background: white; }
img { max-width: 100%; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccd3dc; padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { background: #f2f5f8; }
pre { background: #f2f5f8; padding: .8rem; overflow-x: auto; font-size: 13px; }
em { color: #55606e; }
@media (prefers-color-scheme: dark) {
  body { color: #d5dae1; background: #14171b; }
  th, pre { background: #1f242b; }
  th, td { border-color: #3a424d; }
  em { color: #9aa5b4; }
  a { color: #8fbcf0; }
  /* Plots are dark on white. */
  img { background: white; border-radius: 6px; padding: 6px; box-sizing: border-box; }
}
@media (max-width: 45rem) {
  table { font-size: 13px; }
  th, td { padding: .2rem .35rem; min-width: 3.5rem; }
  p:has(> img) { overflow-x: auto; }
  img { max-width: none; width: 44rem; }
}
</style>
</head>
<body>
BODY
</body>
</html>
"""
