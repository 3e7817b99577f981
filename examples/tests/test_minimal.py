"""The file that people copy first: equal losses anywhere, saved states, and it stands alone."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import spmd_core as spmd

MINIMAL = Path(__file__).parents[1] / "minimal.py"
SHORT = ["--layers", "1", "--batch", "8", "--seq", "32", "--steps", "6"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ran("--steps", "3")`: the program's variables at its end."""

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(MINIMAL), *SHORT, *options])
        with spmd.strict():
            return runpy.run_path(str(MINIMAL), run_name="__main__")

    return run


@pytest.mark.one_device
def test_the_losses_are_those_of_eager_torch(
    ran: Any, num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {1: (1, 1), 2: (2, 1), 8: (4, 2)}[num_devices]
    expected = ran("--device", "cpu")["losses"]
    before = spmd.metrics.counter("compiles")
    found = ran("--fsdp", str(axes[0]), "--tensor", str(axes[1]))
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.3
    assert spmd.metrics.counter("compiles") - before <= 1
    out = capsys.readouterr().out
    assert "step     4  loss" in out and " at peak on a device" in out
    assert ("all-gather over fsdp" in out) == (num_devices > 1)
    bf16 = ran("--fsdp", str(axes[0]), "--tensor", str(axes[1]), "--bf16")["losses"]
    assert bf16 == pytest.approx(expected, abs=0.05) and bf16 != expected


def test_a_run_that_was_interrupted_goes_on_elsewhere(
    ran: Any, num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ran("--device", "cpu")["losses"]
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--save-every", "4"]
    save = spmd.save

    def interrupted(*state: Any) -> None:
        save(*state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(spmd, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ran(*options, "--fsdp", str(num_devices))
    rest = ran(*options, "--device", "cpu")
    assert rest["first"] == 4
    assert rest["losses"] == pytest.approx(expected[4:], rel=1e-5)
    assert ran(*options, "--device", "cpu")["losses"] == []  # it was saved at its end


def test_it_imports_nothing_of_the_other_examples() -> None:
    tree = ast.parse(MINIMAL.read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert "torch" in modules
    assert not [name for name in modules if str(name).partition(".")[0] == "examples"]
