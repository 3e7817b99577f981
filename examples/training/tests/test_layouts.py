"""The table of layouts: axes beside the dims that they split, equal layers on one line."""

import pytest
import torch
from rich.console import Console
from torch import nn

import spmd_core as spmd
from examples.training.layouts import layout_table


class Model(nn.Module):
    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def lines(table: object) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return [line.split("  ") for line in captured.get().splitlines()]


def test_each_dim_names_its_axes(num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the sizes are those of 8 devices")
    mesh = spmd.Mesh(range(8), (2, 4), ("fsdp", "tensor"))
    layers = [nn.Linear(16, 32) for _ in range(3)]
    model = Model(layers).to("xla")
    for layer in layers[:2]:
        spmd.mark_sharding(layer.weight, mesh, (("fsdp", "tensor"), None))
        spmd.mark_sharding(layer.bias, mesh, ("tensor",))
    found = lines(layout_table(model, spmd.ShardingSpec(mesh, (None, "fsdp", None))))
    rows = [[cell.strip() for cell in line if cell.strip()] for line in found]
    assert ["token ids", "(B fsdp, T)"] in rows
    assert ["layers.*", "(32 fsdp tensor, 16)", "2", "0.5 KiB"] in rows
    assert ["layers.*", "(32, 16)", "1", "2.0 KiB"] in rows
    assert ["layers.*.bias", "(32 tensor)", "2", "0.1 KiB"] in rows
    assert ["all parameters", "6", "2.7 KiB"] in rows


def test_a_model_on_the_cpu_is_whole() -> None:
    with torch.device("cpu"):
        rows = lines(layout_table(Model([nn.Linear(16, 32)])))
    assert any("(32, 16)" in " ".join(row) for row in rows)
