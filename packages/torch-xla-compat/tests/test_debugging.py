"""Tests torch_xla.distributed.spmd.debugging: tables of shardings, rendered as text."""

import pytest
import torch
from rich.console import Console

import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd.debugging import (
    construct_v1_sharding_str,
    visualize_sharding,
    visualize_tensor_sharding,
)


def rendered(table):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_printed_table_is_upstreams(capsys):
    visualize_sharding("{devices=[2,2]0,1,2,3}", use_color=False)
    assert capsys.readouterr().out == (
        "Visualizing {devices=[2,2]0,1,2,3} (showing up to the first two dimensions)\n"
        "┌───────┬───────┐\n"
        "│       │       │\n"
        "│ CPU 0 │ CPU 1 │\n"
        "│       │       │\n"
        "├───────┼───────┤\n"
        "│       │       │\n"
        "│ CPU 2 │ CPU 3 │\n"
        "│       │       │\n"
        "└───────┴───────┘\n"
    )


def test_a_coloured_console_has_no_lines(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    visualize_sharding("{devices=[1,2]0,1}")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        [],
        ["CPU", "0", "CPU", "1"],
        [],
    ]


def test_a_replicated_tensor_lists_all_devices(num_devices):
    shown = "\n".join(rendered(visualize_sharding("{replicated}", use_color=False)))
    assert f"CPU {list(range(num_devices))}" in shown
    unmarked = visualize_tensor_sharding(torch.zeros(2).to("xla"), use_color=False)
    assert "\n".join(rendered(unmarked)) == shown


def test_three_dims_are_drawn_as_by_spmd_core():
    shown = "\n".join(rendered(visualize_sharding("{devices=[2,1,2]<=[4]}", use_color=False)))
    assert "block 1 of dim 0" in shown


def test_without_rich_it_is_upstreams_value_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"requires `rich` to be installed\. Run: pip install"):
        visualize_sharding("{replicated}")


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", ["CPU [0, 1]", "CPU [6, 7]"]),
        ("{devices=[4]0,1,2,3}", ["CPU 0", "CPU 3"]),
        ("{devices=[2,2]<=[4]}", ["CPU 1", "CPU 2"]),
        ("{devices=[2,2]8,9,10,11}", ["CPU 8", "CPU 11"]),
    ],
)
def test_other_texts(text, cells):
    shown = "\n".join(rendered(visualize_sharding(text, use_color=False)))
    assert all(cell in shown for cell in cells)


def test_a_tensor(row, num_devices):
    t = xs.mark_sharding(torch.randn(8, 8).to("xla"), row, (0, 1))
    shown = "\n".join(rendered(visualize_tensor_sharding(t, use_color=False)))
    assert all(f"CPU {i}" in shown for i in range(num_devices)) or (
        "CPU" in shown and num_devices == 1
    )
    assert construct_v1_sharding_str(t) == t.sharding_spec


def test_something_else_is_a_value_error():
    with pytest.raises(
        ValueError, match="a sharding is shown from XLA's text of it; got 'garbage'"
    ):
        visualize_sharding("garbage")
