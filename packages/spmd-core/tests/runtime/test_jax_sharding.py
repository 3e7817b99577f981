"""Our shardings as jax's: the same block on the same device, also over a common mesh."""

import numpy as np
import pytest

from spmd_core.runtime import devices, jax_sharding
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding


def slices_by_device(named, shape):
    ids = {device: devices.position_of_device(device) for device in named.device_set}
    found = named.devices_indices_map(shape)
    return {ids[d]: tuple(s.indices(n)[:2] for s, n in zip(found[d], shape)) for d in ids}


def expected_slices(sharding, shape):
    return {
        device: tuple((s.start, s.stop) for s in slices)
        for device, slices in zip(sharding.mesh.ids, sharding.indices(shape))
    }


@pytest.fixture
def reversed_mesh(num_devices):
    if num_devices % 2:
        pytest.skip("two axes need an even number of devices")
    return Mesh(range(num_devices)[::-1], (num_devices // 2, 2), ("a", "b"))


@pytest.mark.parametrize("spec", [("a", "b"), (("b", "a"), None), (None, "b"), ()])
def test_a_mesh_in_another_order_keeps_its_devices(reversed_mesh, spec):
    sharding = Sharding.of(reversed_mesh, spec, 2)
    named = jax_sharding.named_sharding(sharding)
    assert slices_by_device(named, (16, 16)) == expected_slices(sharding, (16, 16))


def test_several_meshes_over_their_common_refinement(num_devices):
    if num_devices != 8:
        pytest.skip("the meshes are of eight devices")
    shardings = [
        Sharding.of(Mesh(range(8), (8,), ("x",)), ("x", None), 2),
        Sharding.of(Mesh(range(8), (2, 4), ("a", "b")), ("b", "a"), 2),
        Sharding.of(Mesh(range(8), (4, 2), ("a", "b")), (("b", "a"), None), 2),
    ]
    named = [jax_sharding.named_sharding(s) for s in shardings]
    common = jax_sharding.CommonMesh(named, tuple(range(8)))
    assert common.exists
    for sharding, before in zip(shardings, named):
        again = common(before)
        assert again.mesh == common(named[0]).mesh
        assert slices_by_device(again, (16, 16)) == expected_slices(sharding, (16, 16))


def test_meshes_without_a_common_refinement():
    if devices.global_runtime_device_count() < 6:
        pytest.skip("the meshes are of six devices")
    meshes = [Mesh(range(6), shape, ("a", "b")) for shape in ((2, 3), (3, 2))]
    named = [jax_sharding.named_sharding(Sharding.of(m, ("a", "b"), 2)) for m in meshes]
    common = jax_sharding.CommonMesh(named, tuple(range(6)))
    assert not common.exists and common(named[1]) is named[1]


def test_partition_specs_name_the_meshs_axes():
    mesh = Mesh(range(4), (2, 2))
    spec = jax_sharding.jax_partition_spec(Sharding.of(mesh, ((1, 0), None), 2))
    assert tuple(spec) == (("axis1", "axis0"), None)
    assert np.array_equal(jax_sharding.jax_axis_names(mesh), ("axis0", "axis1"))
