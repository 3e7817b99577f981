"""Collectives over one axis, and over two in either order, are numpy's sums and rearrangements."""

import math

import numpy as np
import pytest
import torch

import spmd_core as spmd

AXES = ["a", "b", ("a", "b"), ("b", "a")]


def blocks(mesh):
    """A block of 4 x 8 for each device, stacked in the order of the mesh: (a, b, 4, 8)."""
    shape = (*mesh.mesh_shape, 4, 8)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def on_each_device(mesh, function):
    """What `function` returns of the block on each device, in the order of the mesh."""
    given = blocks(mesh)
    x = torch.from_numpy(given).to("xla")
    spec = ("a", "b", None, None)
    mapped = spmd.shard_map(lambda block: function(block[0, 0])[None, None], mesh, [spec], spec)
    return given, mapped(x).cpu().numpy()


def along(mesh, given, axes):
    """The blocks of the devices along axes, major first, for each device: (a, b, n, 4, 8)."""
    numbers = [mesh.axis_names.index(axis) for axis in ((axes,) if isinstance(axes, str) else axes)]
    found = np.empty((*mesh.mesh_shape, math.prod(mesh.mesh_shape[i] for i in numbers), 4, 8))
    for place in np.ndindex(*mesh.mesh_shape):
        for n, other in enumerate(np.ndindex(*(mesh.mesh_shape[i] for i in numbers))):
            source = list(place)
            for axis, position in zip(numbers, other):
                source[axis] = position
            found[place][n] = given[tuple(source)]
    return found


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize(("op", "numpys"), [("sum", np.sum), ("mean", np.mean), ("max", np.max)])
def test_all_reduce(mesh_2d, axes, op, numpys):
    given, got = on_each_device(mesh_2d, lambda x: spmd.manual.all_reduce(x, axes, op))
    expected = numpys(along(mesh_2d, given, axes), axis=2)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_gather(mesh_2d, axes):
    given, got = on_each_device(mesh_2d, lambda x: spmd.manual.all_gather(x, axes, 1))
    expected = np.concatenate(np.moveaxis(along(mesh_2d, given, axes), 2, 0), axis=3)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_reduce_scatter(mesh_2d, axes):
    size = math.prod(mesh_2d.shape()[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def own_part(x):
        # The same shape on every device: the part, put back by a gather of its own.
        return spmd.manual.all_gather(spmd.manual.reduce_scatter(x, axes, 1), axes, 1)

    given, got = on_each_device(mesh_2d, own_part)
    assert 8 % size == 0
    expected = along(mesh_2d, given, axes).sum(2)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_to_all_there_and_back(mesh_2d, axes):
    def there(x):
        return spmd.manual.all_to_all(x, axes, 1, 0)

    given, got = on_each_device(mesh_2d, lambda x: spmd.manual.all_to_all(there(x), axes, 0, 1))
    np.testing.assert_array_equal(got, given)
    given, got = on_each_device(mesh_2d, there)
    size = got.shape[2] // 4
    numbers = ["ab".index(axis) for axis in ((axes,) if isinstance(axes, str) else axes)]
    for place in np.ndindex(*mesh_2d.mesh_shape):
        own = np.ravel_multi_index(
            [place[i] for i in numbers], [mesh_2d.mesh_shape[i] for i in numbers]
        )
        width = 8 // size
        parts = along(mesh_2d, given, axes)[place][:, :, own * width : (own + 1) * width]
        np.testing.assert_allclose(got[place], np.concatenate(list(parts)), rtol=1e-6)
