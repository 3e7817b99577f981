"""Each block has one owner, and no chunk lies in two blocks."""

import itertools
import math

import jax
import numpy as np
import pytest
import torch

from spmd_core.checkpoint import blocks
from spmd_core.marks.marking import mark_sharding
from spmd_core.program import execution

SPECS = [(), ("a",), (None, "b"), ("a", "b"), (("a", "b"),), ("b", "a")]


@pytest.mark.one_device
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 7), (3, 0), (1, 1)], ids=str)
def test_every_element_is_written_once(mesh_2d, spec, shape):
    t = mark_sharding(torch.ones(shape, device="xla"), mesh_2d, spec)
    array = execution.place(t._handle)
    block = array.sharding.shard_shape(array.shape)
    chunk = blocks.chunk_shape(block, shape, 4)
    count = np.zeros(shape, int)
    for own in blocks.owned("w", array.shape, array.sharding):
        inside = blocks.clipped(own.bounds, shape)
        count[tuple(slice(a, b) for a, b in inside)] += 1
        # A block begins where a chunk does.
        assert all(a % c == 0 for (a, b), c in zip(inside, chunk) if a < b)
    assert (count == 1).all()


def test_devices_that_hold_the_same_share_the_work(mesh_1d, num_devices):
    sharding = jax.sharding.NamedSharding(mesh_1d.get_jax_mesh(), jax.sharding.PartitionSpec())
    owners = {next(blocks.owned(f"w{i}", (4,), sharding)).device for i in range(64)}
    assert len(owners) == num_devices


@pytest.mark.parametrize(
    ("block", "shape"),
    [((1 << 14, 1 << 12), (1 << 16, 1 << 12)), ((50257, 4096), (50257, 4096)), ((7, 9), (50, 9))],
)
def test_chunks_are_small_and_divide_blocks(block, shape):
    chunk = blocks.chunk_shape(block, shape, 4)
    assert math.prod(chunk) * 4 <= blocks.MAX_CHUNK_BYTES
    assert math.prod(chunk) * 4 * 4 > min(blocks.MAX_CHUNK_BYTES, math.prod(block) * 4)
    assert all(b % c == 0 for b, c, n in zip(block, chunk, shape) if b < n)


def test_a_prime_number_of_rows_is_cut_into_single_ones(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_CHUNK_BYTES", 8)
    assert blocks.chunk_shape((7, 1), (14, 1), 4) == (1, 1)
    assert blocks.chunk_shape((1, 1), (1, 1), 16) == (1, 1)


def test_chunks_of_all_small_shapes(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_CHUNK_BYTES", 24)
    for block, parts in itertools.product(itertools.product(range(1, 7), repeat=2), (1, 2)):
        shape = tuple(n * parts for n in block)
        chunk = blocks.chunk_shape(block, shape, 4)
        assert math.prod(chunk) * 4 <= 24
        assert parts == 1 or all(b % c == 0 for b, c in zip(block, chunk))
