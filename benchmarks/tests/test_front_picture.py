"""The README's picture is that of the committed results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks import front_picture
from benchmarks.published import plots


def test_the_picture_shows_the_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def save(draw: Callable[[Any], None], path: Path, **options: object) -> None:
        figure = Figure()
        draw(figure)
        drawn.append(figure)

    monkeypatch.setattr(plots, "save", save)
    assert front_picture.main(["--picture", str(tmp_path / "front")]) == 0
    memory, step = drawn[0].axes
    results = front_picture.RESULTS
    in_table = {
        tuple(cells[1:4:2]): cells[2]
        for line in (results / "hbm.md").read_text().splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) > 3
    }
    curves = {line.get_label(): line for line in memory.lines if line.get_marker() == "o"}
    assert list(curves) == ["1 chip", "4 chips", "8 chips", "16 chips"]
    eight = [float(y) for y in curves["8 chips"].get_ydata()]
    shown = [value for (name, _), value in in_table.items() if name.endswith("fsdp=8")]
    assert [f"{y:.2f}" for y in eight] == shown
    assert len(curves["1 chip"].get_ydata()) == 3  # 4B fits no single chip
    heights = [f"{bar.get_height():.1f}" for bar in step.patches]
    lines = (results / "other_systems.md").read_text().splitlines()
    (wall,) = [line for line in lines if line.startswith("| a step, wall")]
    ours, theirs = [cell.strip() for cell in wall.split("|")][2:4]
    assert heights[:2] == [theirs, ours]


def test_it_writes_a_file(tmp_path: Path) -> None:
    assert front_picture.main(["--picture", str(tmp_path / "front")]) == 0
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["front.png"]
