"""Sections of a dim: what devices exchange, whether each chunk comes to its place, the kernels."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

import spmd_core as spmd
from spmd_core.graph.values import Spec
from spmd_core.program.sections import Exchange, Sections


def run(exchange, blocks):
    """What the devices have after an exchange, and how many chunks each sent to others."""
    num, moved = len(blocks), [0] * len(blocks)
    sending = [[own[i] for i in order] for own, order in zip(blocks, exchange.sent)]
    received, start = [[] for _ in blocks], 0
    for count, receivers in exchange.rounds:
        assert sorted(receivers) == list(range(num))  # none gets two
        for sender, receiver in enumerate(receivers):
            received[receiver] += sending[sender][start : start + count]
            moved[sender] += count * (sender != receiver)
        start += count
    return [[own[i] for i in order] for own, order in zip(received, exchange.placed)], moved


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 16))
def test_each_chunk_comes_to_its_place_and_moves_once(counts, num_devices):
    chunks = [(s, i) for s, n in enumerate(counts) for i in range(n * num_devices)]
    own = sum(counts)
    lying = [chunks[d * own : (d + 1) * own] for d in range(num_devices)]
    wanted = [
        [(s, d * n + i) for s, n in enumerate(counts) for i in range(n)] for d in range(num_devices)
    ]
    exchange = Exchange.of(counts, num_devices)
    found, moved = run(exchange, lying)
    assert found == wanted
    assert moved == [len({*a} - {*b}) for a, b in zip(lying, wanted)]
    assert run(exchange.reversed, wanted)[0] == lying


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((15, 15, 15), "the axis splits none evenly"),
        ((16, 16, 15), "nor one"),
        ((16,), "one section"),
        ((16, 0), "an empty one"),
        ((512, 2), "a device would send hundreds of chunks"),
    ],
)
def test_what_are_no_sections(sizes, why):
    assert Sections.of(spmd.Mesh([0, 1], (1, 2), ("a", "b")), 1, sizes) is None, why


@pytest.mark.parametrize("sizes", [(8, 8, 8), (32, 8, 8), (24, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_kernels_move_cut_and_join(mesh_2d, num_devices, dim, sizes):
    sections = Sections.of(mesh_2d, 0, sizes)
    num, total = mesh_2d.mesh_shape[0], sum(sizes)
    x = np.arange(3 * total, dtype=np.int32).reshape((3, total) if dim else (total, 3))
    parts = np.split(x, np.cumsum(sizes)[:-1], axis=dim)
    by_device = zip(*(np.split(part, num, axis=dim) for part in parts))
    ordered = np.concatenate([block for own in by_device for block in own], axis=dim)
    spec = Spec.contiguous(x.shape, torch.int32)

    def result(entry, *arrays):
        return jax.jit(lambda *inputs: entry.kernel(None, inputs, []))(*arrays)

    np.testing.assert_array_equal(result(sections.order(dim, spec), x)[0], ordered)
    np.testing.assert_array_equal(result(sections.restore(dim, spec), ordered)[0], x)
    np.testing.assert_array_equal(result(sections.join(dim, spec), *parts)[0], ordered)
    for found, part in zip(result(sections.cut(dim, spec), ordered), parts, strict=True):
        np.testing.assert_array_equal(found, part)


def test_a_device_reads_its_position_as_data():
    """A region in a region, as `lax.axis_index` would make, is lost to XLA in some programs."""
    if spmd.global_runtime_device_count() < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(4), (2, 2), ("rows", "heads"))
    spec = Spec.contiguous((24, 4), torch.float32)
    sections = Sections.of(mesh, 1, (8, 8, 8))
    for entry in (sections.order(0, spec), sections.restore(0, spec)):
        text = (
            jax.jit(lambda x, own=entry: own.kernel(None, [x], []))
            .lower(np.ones((24, 4)))
            .as_text()
        )
        assert "manual_computation" in text and "partition_id" not in text
