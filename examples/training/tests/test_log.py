"""A console without a terminal wraps nothing."""

import pytest
from rich.table import Table

from examples.training.log import console


def test_a_file_has_no_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("name", "value")
    name = "model.layers.*.self_attn.q_proj.lora_A.default" * 4
    table.add_row(name, "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any(name in line for line in lines)
    assert max(map(len, lines)) < len(name) + 20  # and no spaces up to the console's width
    monkeypatch.setenv("COLUMNS", "60")
    console().print(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60
