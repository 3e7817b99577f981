"""The command of the published plots: its options, its folder, its report; with rows of no time."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks.published import command, plots, report, runner
from benchmarks.published.figures import Figure
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Measured, Row, Samples, Settings

CODE = "import sys; open(sys.argv[1] + '/n', 'w').write('2.5')"


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MagicMock()
    probe.return_value.__enter__.return_value.seconds.return_value = 0.1
    monkeypatch.setattr(runner, "Probe", probe)


def number(folder: Path, seconds: float) -> Samples:
    return {"step_s": [float((folder / "n").read_text()), 3.5]}


def figure(name: str, *codes: str) -> Figure:
    def rows(settings: Settings) -> list[Row]:
        return [Row(name, f"row {i}", ("-c", c, "{run}"), number) for i, c in enumerate(codes)]

    def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
        def draw(figure: Any) -> None:
            axes = figure.subplots()
            plots.curves(axes, {"ours": [(1.0, row["step_s"]) for row in measured.values()]})
            plots.published(axes, 2.0, 3.0, "published")

        lines = [(key, plots.text(row["step_s"], ".1f")) for key, row in measured.items()]
        beside = Comparison("a thing", "26 GB", "27 GB", "another compiler")
        picture = Picture(name, f"The plot of {name}", draw, (3.0, 2.0))
        return Section(f"Of {name}", "Why?", ("", "step"), lines, ["A note."], [beside], [picture])

    return Figure(name, rows, section)


def run(figures: Sequence[Figure], *options: str) -> int:
    return command.main(figures, "The doc.", options)


def test_the_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [figure("gpt2", CODE), figure("hbm", CODE, "raise SystemExit('boom')")]
    assert run(figures, "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert re.search("3 runs to do: about . minutes? left, if nothing else runs here", said.out)
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| row 0 \| 3\.0\u00a0±\u00a0\d+\.\d \|", text)
    assert "![The plot of hbm](hbm.png)" in text
    assert "| a thing | 26 GB | 27 GB | another compiler |" in text
    assert "## Rows that failed\n\n**hbm, row 1**" in text and "boom" in text
    assert "python -c" in text and "Written by `scripts/bench.sh --quick`" in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "hbm.png" not in page
    assert "<td>26 GB</td>" in page and "http" not in page
    assert (tmp_path / "gpt2.svg").read_text().lstrip().startswith("<?xml")
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["status"] for row in found["rows"]] == ["done", "done", "failed"]
    assert "1 rows failed" in said.err


def test_only_some_figures_and_a_report_of_all_that_is_there(tmp_path: Path) -> None:
    figures = [figure("gpt2", CODE), figure("hbm", CODE)]
    assert run(figures, "--only", "hbm", "--out", str(tmp_path)) == 0
    assert "Of gpt2" not in (tmp_path / "report.md").read_text()
    assert run(figures, "--only", "gpt2", "--out", str(tmp_path)) == 0
    text = (tmp_path / "report.md").read_text()
    assert text.index("Of gpt2") < text.index("Of hbm")


def test_a_figure_alone_prints_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hbm", "--out", str(tmp_path)])
    assert command.alone(figure("hbm", CODE), "Doc.") == 0
    assert "Of hbm" in capsys.readouterr().out
    assert (tmp_path / "hbm.png").exists() and not (tmp_path / "report.md").exists()


def test_after_an_interruption_the_command_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.runner, "run", stop)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert run([figure("gpt2", CODE), figure("hbm", CODE)], "--only", "gpt2") == 130
    (folder,) = tmp_path.iterdir()
    words = f"interrupted; to go on: scripts/bench.sh --only gpt2 --out {folder}"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--only", "gpt2,hmb"],
            "--only takes names of figures, with commas; got 'hmb'. Choose among gpt2, hbm.",
        ),
        (["--topology", "v4-17"], "got 'v4-17'. Similar names: v4-16, "),
        (["--topology", "cpu-8"], "names the TPUs to compile for; got 'cpu-8', which are CPUs."),
        (["--device", "cuda"], "--device cuda needs a GPU that jax finds; got "),
    ],
)
def test_what_is_refused(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # no GPU, where there is one
    figures = [figure("gpt2", CODE), figure("hbm", CODE)]
    assert run(figures, "--out", str(tmp_path / "new"), *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "new").exists()


def test_a_topology_without_its_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    figures = [figure("gpt2", CODE), figure("hbm", CODE)]
    assert run(figures, "--topology", "v4-16", "--out", str(tmp_path)) == 2
    assert "Run: pip install 'spmd-core[tpu]'" in capsys.readouterr().err


def test_a_folder_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text('{"version": 99, "rows": []}')
    assert run([figure("gpt2", CODE)], "--out", str(tmp_path)) == 2
    assert "got version 99" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([figure("gpt2", CODE), figure("hbm", CODE)], "--help")
    assert ended.value.code == 0
    assert "some figures, of gpt2,hbm" in capsys.readouterr().out


def test_one_plot_twice_is_the_same_file(tmp_path: Path) -> None:
    section = figure("gpt2").section(Settings(), {})
    for name in ("a", "b"):
        report.draw(tmp_path / name, [section])
    a, b = ((tmp_path / name / "gpt2.svg").read_bytes() for name in ("a", "b"))
    assert a == b
