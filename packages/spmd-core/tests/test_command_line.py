"""Commands of `python -m` and console scripts are known by their command lines."""

import sys

import pytest

from spmd_core import command_line


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["-m", "--help"], ["python", "-m", "spmd_core.plan", "--help"], "spmd_core.plan"),
        (["/usr/bin/spmd-plan", "--help"], ["python", "spmd-plan", "--help"], "spmd_core.plan"),
        (["spmd-checkpoint"], ["python", "spmd-checkpoint"], "spmd_core.checkpoint"),
        (["-m"], ["python", "-m", "examples.gpt2.train"], None),
        (["train.py"], ["python", "train.py"], None),
        ([], ["python"], None),
    ],
)
def test_the_command_is_known(monkeypatch, argv, original, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    found = [
        module
        for module in ("spmd_core.plan", "spmd_core.checkpoint")
        if command_line.is_any() and command_line.is_command(module)
    ]
    assert found == ([expected] if expected else [])
