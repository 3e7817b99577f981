"""The bound's arithmetic, against sums that are written out."""

import math

import pytest

from benchmarks import memory_bound
from benchmarks.reference_jax_program import Setup, parameter_shapes, partition_spec
from examples.gpt2.presets import PRESETS, ModelPreset

# 2 layers, width 8, 2 heads, vocabulary 128, 4 positions
TINY = ModelPreset("tiny", 2, 8, 2, 128, 4, 4, 1, 1e-3)


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (4, 1), (4, 2)])
def test_state_is_12_bytes_for_each_element_of_the_shards(fsdp: int, tensor: int) -> None:
    setup = Setup(PRESETS["0.5B"], fsdp, tensor)
    sizes = {"fsdp": fsdp, "tensor": tensor}
    elements = 0
    for name, shape in parameter_shapes(setup).items():
        axes = [axis for entry in partition_spec(name) for axis in _axes(entry)]
        elements += math.prod(shape) // math.prod(sizes[axis] for axis in axes)
    found = memory_bound.bound(PRESETS["0.5B"], fsdp=fsdp, tensor=tensor)
    assert found.state == 12 * elements


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def test_one_device_ends_with_all_gradients() -> None:
    found = memory_bound.moments(TINY)["end of backward"]
    products = 2 * (12 * 64 + 9 * 8)  # weights, biases of 24 + 8 + 32 + 8
    others = (128 + 4) * 8 + 2 * 4 * 8 + 2 * 8  # tables, norms of the blocks, the last norm
    assert found.gradients == 2 * products + 4 * others
    assert found.state == 12 * (products + others)
    assert found.total == found.state + found.gradients


def test_gradients_that_are_summed_over_devices_have_4_bytes() -> None:
    model = PRESETS["4B"]
    found = memory_bound.moments(model, fsdp=8)["end of backward"]
    # ZeRO's 16 bytes a parameter; biases and layer norms, which are whole, add a little.
    assert 16 <= found.total / (model.num_params(50304) / 8) < 16.1


def test_the_head_has_all_block_inputs_the_logits_and_the_gathered_table() -> None:
    found = memory_bound.moments(TINY, fsdp=2, batch=3)["head"]
    tokens = 3 * 4
    assert found.block_inputs == 4 * tokens * 8 * 2
    assert found.activations == 2 * tokens * 128 + 4 * tokens * 8
    assert found.gathered == 2 * 128 * 8


def test_a_block_has_its_activations_and_its_largest_weight() -> None:
    first, last = (
        memory_bound.moments(TINY, fsdp=2, tensor=2, batch=3)[f"{which} block"]
        for which in ("first", "last")
    )
    tokens = 3 * 4
    assert first.activations == last.activations == tokens * 8 * (4 + (6 + 2 + 8) / 2)
    assert first.gathered == 2 * 8 * 32 / 2
    assert (first.block_inputs, last.block_inputs) == (4 * tokens * 8, 4 * tokens * 8 * 2)
    assert first.gradients > last.gradients


def test_the_bound_is_the_largest_moment() -> None:
    model = PRESETS["0.5B"]
    few, many = memory_bound.bound(model), memory_bound.bound(model, fsdp=16, batch=16)
    assert few == memory_bound.moments(model)["end of backward"]
    assert many == memory_bound.moments(model, fsdp=16, batch=16)["head"]
