"""One torch_xla program under several systems: its figures, and what is said of one that fails.

The program itself runs here under torch-xla-compat; other systems are scripts that pretend.
"""

import argparse
import importlib
import json
import math
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import other_systems
from benchmarks.other_systems import OURS, PROGRAMS, RECIPES, TORCH_XLA, TORCHAX
from benchmarks.single_operations import OPERATIONS

SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "seq": 16, "batch": 4}
SMALL_IMAGES = {"image": 64, "batch": 8}


def interpreter(folder: Path, code: str) -> str:
    """A Python whose every program is this code; the command line is in `sys.argv[1:]`."""
    script = folder / "program.py"
    script.write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def figures(losses: list[float], **changed: Any) -> dict[str, Any]:
    found = {"version": "1", "torch": "2.13.0", "losses": losses, "first_loss_s": 3.0}
    times = {"wall_s": [0.2, 0.4, 0.3], "cpu_s": [0.5], "record_s": [0.01], "dispatch_s": [0.002]}
    return found | times | {"us": {"add": 4.0, "mm": 5.0}} | changed


def writing(found: dict[str, Any]) -> str:
    return (
        "import json, sys\n"
        f"open(sys.argv[sys.argv.index('--results') + 1], 'w').write({json.dumps(found)!r})\n"
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_program_runs_here_and_its_losses_are_those_of_eager_torch(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SMALL_IMAGES if recipe == "resnet" else SMALL
    words = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    words += ["--recipe", recipe, "--steps", "2"]
    devices = math.prod(RECIPES[recipe][1].values())
    found = other_systems.measured(sys.executable, PROGRAMS[OURS], words, devices)
    assert all(len(found[name]) == 2 and min(found[name]) > 0 for name in other_systems.STEP)
    assert set(found.get("us", OPERATIONS)) == set(OPERATIONS)
    monkeypatch.syspath_prepend(other_systems.SYSTEMS)
    job = importlib.import_module(f"{recipe}_step").job(argparse.Namespace(**sizes))
    assert job.axes == RECIPES[recipe][1]
    optimizer = job.optimizer(job.model.parameters())
    losses = []
    for _ in found["losses"]:
        loss = job.loss(job.model, *job.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert found["losses"] == pytest.approx(losses, rel=1e-5 if recipe != "resnet" else 1e-4)


def test_sizes_are_those_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(other_systems.SYSTEMS)
    options = importlib.import_module("step_options")
    words = ["--results", "x", "--recipe", "resnet", "--batch", "4"]
    args = options.read("", ["gpt2", "resnet"], words)
    assert (args.batch, args.image, args.layers) == (4, 64, None)
    with pytest.raises(SystemExit):
        options.read("", ["gpt2", "resnet"], [*words, "--layers", "2"])
    assert "--layers is no size of resnet, whose sizes are image, batch. Leave it out." in (
        capsys.readouterr().err
    )


def test_a_program_that_fails(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "import no_such_module\n")
    with pytest.raises(RuntimeError, match=r"code 1 and \"ModuleNotFoundError: No module named"):
        other_systems.measured(python, PROGRAMS[TORCH_XLA], [], 2)
    python = interpreter(tmp_path, "import sys; sys.exit(3)\n")
    with pytest.raises(RuntimeError, match=r"code 3 and 'no output'. `--help` says what to"):
        other_systems.measured(python, PROGRAMS[TORCHAX], [], 2)


def test_runs_of_a_system_are_joined() -> None:
    found = other_systems.combined([figures([3.0]), figures([3.0], wall_s=[0.9])])
    assert found["wall_s"] == [0.2, 0.4, 0.3, 0.9]
    assert found["us"] == {"add": [4.0, 4.0], "mm": [5.0, 5.0]}
    assert found["first_loss_s"] == [3.0, 3.0]


@pytest.mark.parametrize(("loss", "code", "word"), [(2.00001, 0, "yes"), (2.1, 1, "NO")])
def test_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    loss: float,
    code: int,
    word: str,
) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = interpreter(tmp_path / "theirs", writing(figures([3.0, loss])))
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, writing(figures([3.0, 2.0]))))
    out = tmp_path / "out"
    words = ["other_systems", "--torch-xla", theirs, "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert other_systems.main() == code
    text = (out / "other_systems.md").read_text()
    assert f"{word}: losses differ by at most" in text
    assert "| a step, wall time, ms | 300.0 | 300.0 |" in text
    assert "| add, us | 4.0 | 4.0 |" in text
    assert "Not at hand: torchax." in text
    written = json.loads((out / "other_systems.json").read_text())
    assert len(written["systems"][TORCH_XLA]["wall_s"]) == 6


def test_a_system_that_has_no_parts_of_a_step() -> None:
    jitted = {k: v for k, v in figures([3.0]).items() if k not in ("record_s", "dispatch_s")}
    found = {
        name: other_systems.combined([of])
        for name, of in ((OURS, figures([3.0])), (TORCHAX, jitted))
    }
    rows = {row[0]: row[1:] for row in other_systems.table_of(found, [], recipe="gpt2").rows}
    assert rows["recording it, ms"] == ["10.0", "-"]
    assert rows["largest difference of losses"] == ["0e+00", "0e+00"]
