"""runtime/torus.py: collectives over an axis that libtpu would not compile as what they are."""

import copy
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.program import compile_cache
from spmd_core.runtime import torus


def box(x, y, z):
    """The coordinates of a slice's chips in the order of their ids, as libtpu numbers them."""
    return np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)])


def summed(parts, stages):
    """What each position has after the stages; `parts` is (position, block)."""
    held = [dict(enumerate(row)) for row in parts]
    for groups in stages:
        groups = groups or (tuple(range(len(held))),)
        after = list(held)
        for group in groups:
            blocks = sorted(held[group[0]])
            size = len(blocks) // len(group)
            for i, position in enumerate(group):
                own = blocks[i * size : (i + 1) * size]
                after[position] = {b: sum(held[p][b] for p in group) for b in own}
        held = after
    return held


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("shape", "most_dims"),
    [
        *(((2, 2, 2), 2), ((2, 2, 4), 2), ((4, 4, 4), 2), ((4, 4, 8), 2), ((2, 4, 8), 2)),
        *(((4, 4, 1), 1), ((8, 8, 1), 1)),
    ],
)
def test_each_position_gets_its_block_of_the_sum(shape, most_dims):
    coords = box(*shape)
    stages = torus._stages(coords[:, None], is_whole=True)
    assert len(stages) == 2
    for groups in stages:
        assert sorted(itertools.chain(*groups)) == list(range(len(coords)))
        assert all(torus._num_dims(coords[:, None], group) <= most_dims for group in groups)
    parts = np.random.default_rng(0).integers(0, 100, (len(coords), len(coords)))
    for position, held in enumerate(summed(parts, stages)):
        assert held == {position: parts[:, position].sum()}


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("coords", "is_whole", "reason"),
    [
        (box(1, 1, 8), True, "a line"),
        (box(2, 2, 1), True, "a small plane"),
        (box(4, 8, 1), True, "a plane of unequal sides"),
        (box(8, 8, 1), False, "a plane in a larger slice"),
        # Every second step leaves the plane of the step before.
        (np.array([(i % 2, i // 2 % 2, i % 3) for i in range(7)]), False, "no split"),
    ],
)
def test_other_axes_scatter_at_once(coords, is_whole, reason):
    assert torus._stages(coords[:, None], is_whole=is_whole) == (None,), reason


def place(monkeypatch, coords, num_slices=1):
    """Devices at these coordinates, in each slice."""
    found = [
        SimpleNamespace(coords=tuple(map(int, c)), slice_index=i)
        for i in range(num_slices)
        for c in coords
    ]
    monkeypatch.setattr(torus.devices, "all_devices", lambda: found)
    clear()


def clear():
    torus.stages.cache_clear()
    torus.gather_stages.cache_clear()


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("shape", "num_stages"), [((4, 4, 4), 2), ((4, 4, 8), 2), ((2, 4, 4), 1), ((8, 8, 1), 1)]
)
def test_gathers_over_all_of_a_torus(shape, num_stages, monkeypatch):
    coords = box(*shape)
    place(monkeypatch, coords)
    size = len(coords)
    whole = torus.gather_stages(spmd.Mesh(range(size), (size,), ("fsdp",)), (0,))
    assert len(whole) == num_stages
    part = spmd.Mesh(range(size), (2, size // 2), ("data", "fsdp"))
    assert torus.gather_stages(part, (1,)) == (None,)
    held = [[i] for i in range(size)]
    for groups in whole:
        after = list(held)
        for group in groups or (tuple(range(size)),):
            for position in group:
                after[position] = [block for p in group for block in held[p]]
        held = after
    assert held == [list(range(size))] * size
    monkeypatch.undo()
    clear()
    assert torus.gather_stages(spmd.Mesh(range(1), (1,), ("x",)), (0,)) == (None,)


@pytest.mark.one_device
def test_an_axis_of_several(monkeypatch):
    place(monkeypatch, box(2, 2, 4))
    mesh = spmd.Mesh(range(16), (8, 2), ("fsdp", "tensor"))
    # Along fsdp, the coordinates y and z change; along tensor, x.
    assert torus.stages(mesh, (0,)) == torus.stages(mesh, (1,)) == (None,)
    mesh = spmd.Mesh(range(16), (2, 8), ("fsdp", "tensor"))
    assert torus.stages(mesh, (0,)) == (None,)
    assert torus.stages(mesh, (1,))[1] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert torus.stages(mesh, (0, 1))[1] == tuple((i, i + 1) for i in range(0, 16, 2))
    monkeypatch.undo()
    clear()
    assert torus.stages(spmd.Mesh(range(1), (1,), ("x",)), (0,)) == (None,)  # a CPU has no place


@pytest.mark.one_device
def test_all_of_a_slice(monkeypatch):
    place(monkeypatch, box(4, 4, 1))
    mesh = spmd.Mesh(range(16), (16,), ("fsdp",))
    assert torus.stages(mesh, (0,))[1] == tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))
    place(monkeypatch, box(4, 4, 1), num_slices=2)
    mesh = spmd.Mesh(range(32), (2, 16), ("data", "fsdp"))
    assert torus.stages(mesh, (0,)) == (None,) and len(torus.stages(mesh, (1,))) == 2
    place(monkeypatch, box(4, 8, 1))  # of which fsdp is a half
    assert torus.stages(mesh, (1,)) == (None,)
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("batch", [("fsdp",), ("fsdp", "tensor")])
@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 4)])
@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (13, 8)])
def test_gradients_that_are_scattered_in_stages(
    shape, batch, rows, columns, num_devices, monkeypatch
):
    if num_devices != 8:
        pytest.skip("two stages need four devices along an axis")
    axes = ("fsdp", "tensor")[: len(shape)]
    mesh = spmd.Mesh(range(8), shape, axes)
    if len(axes) < len(batch):
        pytest.skip("a mesh of one axis")
    weight = axes if len(batch) == 1 else (batch,)
    size = shape[0] if len(batch) == 1 else 8
    half = size // 2
    first = tuple(tuple(range(start, size, 2)) for start in range(2))
    second = tuple((2 * i, 2 * i + 1) for i in range(half))
    in_stages = (first, second) if half > 1 else (None,)
    split = tuple(range(len(batch)))
    monkeypatch.setattr(torus, "stages", lambda _, axes: in_stages if axes == split else (None,))
    torch.manual_seed(0)
    model, x = nn.Linear(columns, rows), torch.randn(16, 3, columns)
    ours = nn.Linear(columns, rows)
    ours.load_state_dict(model.state_dict())
    ours.to("xla")
    spmd.mark_sharding(ours.weight, mesh, weight)
    spmd.mark_sharding(ours.bias, mesh, (batch,))
    ours(spmd.mark_sharding(x.to("xla"), mesh, (batch,))).sin().sum().backward()
    spmd.sync()
    text = compile_cache.newest().lowered.stage.as_text()
    assert text.count("stablehlo.reduce_scatter") == 2 * len(in_stages)
    model(x).sin().sum().backward()
    for got, right in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(got.grad.cpu(), right.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_marks_that_gather_in_stages(shape, dim, num_devices, monkeypatch):
    if num_devices != 8:
        pytest.skip("two stages need four devices along an axis")
    product = functools.partial(torch.einsum, "bi,...oi->b...o")
    mesh = spmd.Mesh(range(8), shape, ("data", "fsdp")[-len(shape) :])
    size, split = shape[-1], (len(shape) - 1,)
    half = size // 2
    first = tuple((2 * i, 2 * i + 1) for i in range(half))
    second = tuple(tuple(range(start, size, 2)) for start in range(2))
    monkeypatch.setattr(
        torus, "gather_stages", lambda _, axes: (first, second) if axes == split else (None,)
    )
    outer = (3,) * dim
    spec = (*[None] * dim, "fsdp", None)
    weight, other, x = torch.randn(*outer, 24, 16), torch.randn(*outer, 13, 16), torch.randn(8, 16)
    ours, odd = (
        spmd.mark_sharding(w.to("xla").requires_grad_(), mesh, spec) for w in (weight, other)
    )
    batch = spmd.mark_sharding(x.to("xla"), mesh, ("fsdp", None))
    made = [product(batch, spmd.constrain(w, mesh, (None,) * w.ndim)) for w in (ours, odd)]
    (made[0].sin().sum() + made[1].cos().sum()).backward()
    spmd.sync()
    text = compile_cache.newest().lowered.stage.as_text()
    # Of both: 13 rows over four or eight devices are padded, which only the partitioner gathers.
    assert text.count("stablehlo.all_gather") == 2
    right = [w.clone().requires_grad_() for w in (weight, other)]
    expected = [product(x, w) for w in right]
    (expected[0].sin().sum() + expected[1].cos().sum()).backward()
    for got, value in zip(made, expected):
        torch.testing.assert_close(got.cpu(), value, rtol=1e-5, atol=1e-5)
    for got, value in zip((ours, odd), right):
        torch.testing.assert_close(got.grad.cpu(), value.grad, rtol=1e-5, atol=1e-5)


def test_a_mark_that_moves_a_split_gathers_nothing(num_devices, monkeypatch):
    if num_devices != 8:
        pytest.skip("two stages need four devices along an axis")
    mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
    first, second = (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7)))
    monkeypatch.setattr(torus, "gather_stages", lambda _, axes: (first, second))
    x = torch.randn(16, 24)
    rows = spmd.mark_sharding(x.to("xla"), mesh, ("fsdp", None))
    columns = spmd.constrain(rows, mesh, (None, "fsdp")).sin()
    torch.testing.assert_close(columns.cpu(), x.sin())
    text = compile_cache.newest().lowered.stage.as_text()
    assert "stablehlo.sine" in text and "stablehlo.all_gather" not in text


def test_fully_shard_gathers_in_stages(num_devices, monkeypatch):
    if num_devices != 8:
        pytest.skip("two stages need four devices along an axis")
    mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
    first = tuple((2 * i, 2 * i + 1) for i in range(4))
    second = tuple(tuple(range(start, 8, 2)) for start in range(2))
    monkeypatch.setattr(torus, "gather_stages", lambda _, axes: (first, second))
    model, x = nn.Linear(16, 24, bias=False), torch.randn(8, 16)
    ours = fully_shard(copy.deepcopy(model), mesh)
    ours(spmd.mark_sharding(x.to("xla"), mesh, ("fsdp",))).sin().sum().backward()
    spmd.sync()
    text = compile_cache.newest().lowered.stage.as_text()
    assert text.count("stablehlo.all_gather") == 2 * 2  # in the forward, and again in the backward
    model(x).sin().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad, rtol=1e-5, atol=1e-5)
