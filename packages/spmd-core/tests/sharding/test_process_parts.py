"""The parts of processes against numpy, for 1 to 1,024 processes and meshes of up to 4 axes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from spmd_core.errors import DataError, MeshError
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.process_parts import process_part
from spmd_core.sharding.sharding import Sharding


def model(sharding, process_of, process, shape):
    """For each dim, the indices of a process's data in a global tensor; None if it has no part.

    The parts of all other processes must exist, too.
    """
    found = {}
    for owner in {process_of[i] for i in sharding.mesh.ids}:
        blocks = {
            tuple((s.start, s.stop) for s in index)
            for device, index in zip(sharding.mesh.ids, sharding.indices(shape))
            if process_of[device] == owner
        }
        by_dim = [sorted(set(bounds)) for bounds in zip(*blocks)]
        if math.prod(map(len, by_dim)) != len(blocks):
            return None
        found[owner] = [[i for a, b in bounds for i in range(a, b)] for bounds in by_dim]
    return found.get(process)


@st.composite
def cases(draw):
    """A sharding, the process of each device, and a global shape that the blocks divide."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
    size = math.prod(sizes)
    order = draw(
        st.one_of(
            st.just(list(range(size))),
            # Axes in another order than the processes: the batch's need not be the first.
            st.permutations(range(len(sizes))).map(
                lambda axes: np.arange(size).reshape(sizes).transpose(axes).reshape(-1).tolist()
            ),
            st.randoms(use_true_random=False).map(lambda r: r.sample(range(size), size)),
        )
    )
    num = draw(st.sampled_from([n for n in range(1, min(size, 1024) + 1) if size % n == 0]))
    process_of = [i // (size // num) for i in range(size)]
    axes = draw(st.permutations(range(len(sizes))))
    ndim = draw(st.integers(1, 3))
    spec = [[] for _ in range(ndim)]
    for axis in axes:
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            spec[dim].append(axis)
    sharding = Sharding.of(Mesh(order, sizes), tuple(tuple(entry) for entry in spec), ndim)
    shape = tuple(
        tile * draw(st.integers(0 if dim else 1, 2)) for dim, tile in enumerate(sharding.tiles)
    )
    return sharding, process_of, draw(st.sampled_from(process_of)), shape


@given(cases())
@settings(max_examples=examples(150), deadline=None)
def test_parts_are_the_blocks_of_numpy_in_their_order(case):
    sharding, process_of, process, shape = case
    if math.prod(shape) > 1 << 20:
        return
    rows = model(sharding, process_of, process, shape) if 0 not in shape else None
    try:
        part = process_part(sharding, process_of, process)
    except MeshError:
        assert rows is None
        return
    if 0 in shape:
        assert (
            part.global_shape(
                tuple(n * len(b) // t for n, b, t in zip(shape, part.blocks, part.tiles))
            )
            == shape
        )
        return
    whole = np.arange(math.prod(shape)).reshape(shape)
    local = whole[np.ix_(*rows)]
    assert part.global_shape(local.shape) == shape
    for device, index in zip(sharding.mesh.ids, sharding.indices(shape)):
        if process_of[device] == process:
            bounds = part.local_bounds([(s.start, s.stop) for s in index], local.shape)
            np.testing.assert_array_equal(
                local[tuple(slice(a, b) for a, b in bounds)], whole[index]
            )


@pytest.mark.parametrize("num", [1, 2, 64, 1024])
def test_each_block_of_the_batch_comes_from_someone(num):
    mesh = Mesh(range(4096), (8, 4, 64, 2), ("data", "tensor", "fsdp", "rest"))
    sharding = Sharding.of(mesh, (("fsdp", "data"), None, "tensor"), 3)
    process_of = [i // (4096 // num) for i in range(4096)]
    seen = set()
    # Of many processes some, which are like the others.
    chosen = range(0, num, max(1, num // 64))
    for process in chosen:
        part = process_part(sharding, process_of, process)
        seen.update((a, c) for a in part.blocks[0] for c in part.blocks[2])
        assert part.processes == tuple(range(num)) and part.global_shape(
            (len(part.blocks[0]) * 3, 5, len(part.blocks[2]))
        ) == (512 * 3, 5, 4)
    if len(chosen) == num:
        assert seen == {(a, c) for a in range(512) for c in range(4)}


def test_processes_may_hold_the_same_part_and_blocks_apart():
    mesh = Mesh(range(8), (2, 2, 2), ("tensor", "data", "model"))
    sharding = Sharding.of(mesh, ("data", "model"), 2)
    process_of = [0, 0, 1, 1, 2, 2, 3, 3]
    parts = [process_part(sharding, process_of, p) for p in range(4)]
    assert [p.blocks for p in parts] == [((0,), (0, 1)), ((1,), (0, 1))] * 2
    # A whole dim of any size: every process holds all of its blocks.
    assert parts[0].global_shape((3, 5)) == (6, 5)
    strided = Sharding.of(Mesh([0, 4, 1, 5, 2, 6, 3, 7], (8,)), (0,), 1)
    assert process_part(strided, [i // 4 for i in range(8)], 1).blocks == ((1, 3, 5, 7),)


def test_rows_that_do_not_divide_are_refused():
    sharding = Sharding.of(Mesh(range(8), (8,), ("data",)), ("data",), 2)
    part = process_part(sharding, [i // 4 for i in range(8)], 0)
    with pytest.raises(
        DataError,
        match=r"got size 6 in dim 0 of a tensor of shape \(6, 2\) for 4 of 8 blocks. "
        r"Use 4 or 8 in each process",
    ):
        part.global_shape((6, 2))
    assert part.global_shape((4, 2)) == (8, 2) and part.global_shape((8, 2)) == (16, 2)


def test_a_process_needs_devices_and_a_rectangle():
    sharding = Sharding.of(Mesh(range(4), (4,), ("data",)), ("data",), 1)
    with pytest.raises(MeshError, match=r"process 1 has none in Mesh.*Use a mesh over devices of"):
        process_part(sharding, [0] * 4 + [1] * 4, 1)
    # Process 0 has the blocks (0, 0) and (1, 1).
    mesh = Mesh([0, 2, 3, 1], (2, 2), ("a", "b"))
    corners = Sharding.of(mesh, ("a", "b"), 2)
    with pytest.raises(
        MeshError, match=r"process 0 has 2 blocks of 2 x 2 and would need 4.*order of their ids"
    ):
        process_part(corners, [0, 0, 1, 1], 1)
    ordered = Sharding.of(Mesh(range(4), (2, 2), ("a", "b")), ("a", "b"), 2)
    assert process_part(ordered, [0, 0, 1, 1], 1).blocks == ((1,), (0, 1))
