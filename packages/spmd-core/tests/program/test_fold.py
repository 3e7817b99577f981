"""What a program computes of its inputs: their elements, without the padding of their shards."""

import re

import jax
import numpy as np
import pytest
import torch
from recorded_graphs import graph_of

import spmd_core as spmd
from spmd_core.ops.registry import Number
from spmd_core.program.fold import Scalars
from spmd_core.program.lower import lower
from spmd_core.program.target import Target


@pytest.mark.parametrize("size", [5, 9, 17])
def test_inputs_are_read_without_their_padding(mesh_1d: spmd.Mesh, size: int) -> None:
    x = torch.linspace(1, 2, size)
    ours = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x",))
    spmd.sync()
    torch.testing.assert_close(ours.mean().cpu(), x.mean())
    torch.testing.assert_close(ours.flip(0).cpu(), x.flip(0))


@pytest.mark.one_device
@pytest.mark.parametrize(("platform", "expected"), [("tpu", ["4x"]), ("cpu", ["", "", ""])])
def test_a_tpu_converts_ints_at_once(platform: str, expected: list[str]) -> None:
    x, half = torch.rand(4).to("xla"), torch.rand(4, dtype=torch.bfloat16).to("xla")
    ints = torch.arange(4).to("xla")
    # A 0-dim step count as of an optimizer, an operation that occurs twice, and one with rules.
    count, other = torch.tensor(2.0).to("xla"), torch.tensor(5.0).to("xla")
    graph = graph_of(count + 7, other + 9, x.cumsum(0) * 0.5, half / 3, ints + 11)
    text = lower(graph, Target.of(graph, platform=platform), "step").stage.as_text()
    converted = re.findall(r"convert .*: \(tensor<(.*)i64>\) -> tensor<.*f32>", text)
    assert converted == expected


@pytest.mark.one_device
def test_numbers_in_float32() -> None:
    numbers = [7, 0.25, -(2**40) - 1, True, 2**62 + 2**38 + 1]
    kinds = [type(x) for x in numbers]
    with jax.enable_x64(True):
        packed = [np.array([0.25]), np.array([x for x in numbers if type(x) is not float])]

        def read(packed: list[jax.Array]) -> list[Number]:
            scalars = Scalars(kinds, packed)
            return [scalars.in_float32(i) for i in range(len(numbers))]

        found = jax.jit(read)(packed)
        for number, right in zip(found, numbers):
            assert number.kind is type(right) and number.value == right
            assert (number.float32 is not None) == (number.kind is int)
            # The nearest of each dtype, which is another one by way of float32.
            for dtype in (np.float32, np.float64, jax.numpy.bfloat16):
                assert number.astype(np.dtype(dtype)) == np.asarray(right).astype(dtype)
