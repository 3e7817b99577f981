"""What a program computes of its inputs: their elements, without the padding of their shards."""

import pytest
import torch

import spmd_core as spmd


@pytest.mark.parametrize("size", [5, 9, 17])
def test_inputs_are_read_without_their_padding(mesh_1d: spmd.Mesh, size: int) -> None:
    x = torch.linspace(1, 2, size)
    ours = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x",))
    spmd.sync()
    torch.testing.assert_close(ours.mean().cpu(), x.mean())
    torch.testing.assert_close(ours.flip(0).cpu(), x.flip(0))
