"""Shardings: the canonical form, chosen cases, and what is refused.

`test_sharding_properties.py` has random meshes, specs and shapes.
"""

import copy
import gc
import pickle
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import jax
import numpy as np
import pytest

from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import ShardingSpec, validate_spec
from spmd_core.sharding.sharding import OpSharding, Sharding, ShardingType

MESH_4X2 = Mesh(range(8), (4, 2), ("data", "model"))
MESH_2X2X2 = Mesh(range(8), (2, 2, 2), ("x", "y", "z"))


# the canonical form


@pytest.mark.parametrize(
    ("spec", "ndim", "dims", "canonical"),
    [
        (("data", "model"), 2, ((0,), (1,)), ("data", "model")),
        ((0, 1), 2, ((0,), (1,)), ("data", "model")),
        ((-2, -1), 2, ((0,), (1,)), ("data", "model")),
        (("model", "data"), 2, ((1,), (0,)), ("model", "data")),
        (("data", None), 2, ((0,), ()), ("data", None)),
        (("data",), 3, ((0,), (), ()), ("data", None, None)),
        ((), 2, ((), ()), (None, None)),
        ((), 0, (), ()),
        ([("data", 1), None], 2, ((0, 1), ()), (("data", "model"), None)),
        ((None, ["model", "data"]), 2, ((), (1, 0)), (None, ("model", "data"))),
        ((("data",), ()), 2, ((0,), ()), ("data", None)),
    ],
)
def test_every_spelling_has_one_canonical_form(spec, ndim, dims, canonical):
    sharding = Sharding.of(MESH_4X2, spec, ndim)
    assert sharding.dims == dims
    assert sharding.partition_spec == canonical
    assert sharding.ndim == ndim
    assert Sharding.of(MESH_4X2, canonical, ndim) is sharding


def test_an_unnamed_mesh_has_indices_in_its_canonical_spec():
    assert Sharding.of(Mesh(range(8), (4, 2)), (-1, None), 2).partition_spec == (1, None)


def test_an_axis_of_size_1_is_kept_and_splits_nothing():
    sharding = Sharding.of(Mesh([0, 1], (1, 2), ("one", "two")), ("one", "two"), 2)
    assert sharding.dims == ((0,), (1,))
    assert sharding.tiles == (1, 2)
    assert Sharding.of(sharding.mesh, ("one",), 2).is_replicated


def test_the_same_sharding_is_the_same_object():
    mesh_again = Mesh(range(8), (4, 2), ("data", "model"))
    assert Sharding.of(MESH_4X2, ("data",), 2) is Sharding.of(mesh_again, (0, None), 2)
    assert Sharding.of(MESH_4X2, ("data",), 2) != Sharding.of(MESH_4X2, ("data",), 1)
    assert Sharding.of(MESH_4X2, ("data",), 1) != Sharding.of(Mesh(range(8), (4, 2)), (0,), 1)


def test_equal_shardings_compare_by_value_even_when_not_interned():
    interned = Sharding.of(MESH_4X2, ("data",), 1)
    direct = Sharding(MESH_4X2, ((0,),))
    assert direct == interned
    assert hash(direct) == hash(interned)


def test_a_sharding_cannot_be_changed():
    sharding = Sharding.of(MESH_4X2, ("data",), 1)
    with pytest.raises(FrozenInstanceError):
        sharding.dims = ((),)
    with pytest.raises(ValueError, match="read-only"):
        sharding.tile_assignment[0] = 1


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda sharding: pickle.loads(pickle.dumps(sharding))]
)
def test_copies_are_the_same_object(duplicate):
    sharding = Sharding.of(Mesh([3, 1, 2, 0], (2, 2), ("x", "y")), (None, ("y", "x")), 3)
    assert duplicate(sharding) is sharding


def test_threads_get_one_object():
    mesh = Mesh(range(8), (8,), ("threads",))
    with ThreadPoolExecutor(8) as pool:
        shardings = list(pool.map(lambda _: Sharding.of(mesh, ("threads",), 1), range(200)))
    assert len({id(sharding) for sharding in shardings}) == 1


def test_interning_keeps_no_mesh_alive():
    mesh = Mesh(range(8), (8,), ("short lived",))
    Sharding.of(mesh, (0,), 1).indices((5,))
    alive = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert alive() is None


def test_the_repr_builds_the_sharding():
    sharding = Sharding.of(MESH_4X2, (None, ("model", "data")), 2)
    assert (
        repr(sharding)
        == "Sharding.of(Mesh(range(0, 8), (4, 2), ('data', 'model')), (None, ('model', 'data')), 2)"
    )
    assert eval(repr(sharding)) is sharding


# the documents' examples


def test_documents_four_way_data_parallel_input():
    sharding = Sharding.of(Mesh(range(8), (4, 2), ("x", "y")), (0, None), 2)
    assert sharding.shard_shape((8, 32)) == (2, 32)
    assert sharding.text == "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"


def test_documents_two_way_model_parallel_weight():
    sharding = Sharding.of(Mesh(range(8), (4, 2), ("x", "y")), (None, 1), 2)
    assert sharding.shard_shape((10, 32)) == (10, 16)
    assert sharding.text == "{devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"


def test_documents_each_device_holds_an_eighth():
    sharding = Sharding.of(Mesh(range(8), (2, 4), ("x", "y")), (0, 1), 2)
    assert sharding.shard_shape((8, 4)) == (4, 1)
    assert sharding.num_shards == 8
    assert sharding.text == "{devices=[2,4]0,1,2,3,4,5,6,7}"


def test_documents_axes_swapped():
    assert Sharding.of(MESH_4X2, ("model", "data"), 2).text == "{devices=[2,4]0,2,4,6,1,3,5,7}"


def test_documents_partial_replication_over_y():
    assert (
        Sharding.of(MESH_2X2X2, ("x", "z"), 2).text
        == "{devices=[2,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"
    )
    assert (
        Sharding.of(MESH_2X2X2, ("x", None, "z"), 3).text
        == "{devices=[2,1,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"
    )


def test_documents_eight_by_ten_tensor_sharded_by_rows():
    assert Sharding.of(Mesh(range(8), (4, 2)), (0, None), 2).indices((8, 10))[2] == (
        slice(2, 4),
        slice(0, 10),
    )


# text, replicas, shapes: chosen cases


@pytest.mark.parametrize(
    ("mesh", "spec", "ndim", "text"),
    [
        (MESH_4X2, (), 0, "{replicated}"),
        (MESH_4X2, (), 3, "{replicated}"),
        (MESH_4X2, (("data", "model"),), 1, "{devices=[8]0,1,2,3,4,5,6,7}"),
        (MESH_4X2, (("model", "data"),), 1, "{devices=[8]0,2,4,6,1,3,5,7}"),
        (Mesh([3], (1,)), (0,), 1, "{replicated}"),
        (Mesh([5, 4], (2,)), (0,), 1, "{devices=[2]5,4}"),
        (Mesh([3, 1, 2, 0], (2, 2)), (0,), 2, "{devices=[2,1,2]1,3,0,2 last_tile_dim_replicate}"),
        (Mesh(range(8), (8, 1)), (0, 1), 2, "{devices=[8,1]0,1,2,3,4,5,6,7}"),
    ],
)
def test_text(mesh, spec, ndim, text):
    assert Sharding.of(mesh, spec, ndim).text == text


@pytest.mark.parametrize(
    ("mesh", "spec", "replica_ids"),
    [
        (MESH_4X2, (("data", "model"),), (0,) * 8),
        (MESH_4X2, ("data",), (0, 1) * 4),
        (MESH_4X2, ("model",), (0, 0, 1, 1, 2, 2, 3, 3)),
        (MESH_4X2, (), tuple(range(8))),
        (Mesh([3, 1, 2, 0], (2, 2)), (0,), (1, 0, 1, 0)),
        (Mesh([9, 4, 6], (3,)), (), (2, 0, 1)),
    ],
)
def test_replica_ids_follow_the_device_ids_within_a_group(mesh, spec, replica_ids):
    assert Sharding.of(mesh, spec, 1).replica_ids() == replica_ids


def test_an_uneven_dim_is_padded_at_its_end():
    sharding = Sharding.of(MESH_4X2, ("data", "model"), 2)
    assert sharding.padded_shape((50257, 3)) == (50260, 4)
    assert sharding.shard_shape((50257, 3)) == (12565, 2)
    assert sharding.indices((50257, 3))[-1] == (slice(37695, 50257), slice(2, 3))


def test_a_block_of_padding_only_is_an_empty_slice_at_the_end():
    assert Sharding.of(Mesh(range(4), (4,)), (0,), 1).indices((1,)) == (
        (slice(0, 1),),
        (slice(1, 1),),
        (slice(1, 1),),
        (slice(1, 1),),
    )


def test_a_scalar_is_whole_on_every_device():
    sharding = Sharding.of(MESH_4X2, (), 0)
    assert sharding.indices(()) == ((),) * 8
    assert sharding.shard_shape(()) == sharding.padded_shape(()) == ()
    assert sharding.replica_ids() == tuple(range(8))


def test_a_mesh_of_1024_devices_is_quick():
    start_s = time.perf_counter()
    mesh = Mesh(np.random.default_rng(0).permutation(1024), (4, 16, 16), ("pod", "fsdp", "tensor"))
    sharding = Sharding.of(mesh, (("pod", "fsdp"), None, "tensor"), 3)
    assert sharding.num_shards == 1024
    assert sharding.shard_shape((100, 7, 16)) == (2, 7, 1)
    assert len(sharding.indices((100, 7, 16))) == 1024
    assert sharding.text.startswith("{devices=[64,1,16]")
    assert set(sharding.replica_ids()) == {0}
    assert Sharding.of(mesh, ("tensor",), 1).replica_ids()[0] < 64
    assert time.perf_counter() - start_s < 2, "expected a few milliseconds"


# what a spec refuses: (spec, and from its message: the rule, the value, the advice; a right spec)

REFUSED = {
    "unknown name": (
        ("dat",),
        "one of the mesh's axis names",
        "got 'dat' for Mesh(",
        "Use one of 'data', 'model'",
        ("data",),
    ),
    "index too large": (
        (0, 2),
        "between -2 and 1, as the mesh has 2 axes",
        "got 2",
        "Use one of 'data', 'model'",
        (0, "model"),
    ),
    "index too small": ((-3,), "between -2 and 1", "got -3", "Use one of 'data', 'model'", (-2,)),
    "a bool": (
        (True,),
        "by its index (int) or its name (str)",
        "got True of type bool",
        "Use one of 'data', 'model'",
        (1,),
    ),
    "a float": (
        (0.0, None),
        "by its index (int) or its name (str)",
        "got 0.0 of type float",
        "Use one of 'data', 'model'",
        (0, None),
    ),
    "a dict": (
        ({},),
        "by its index (int) or its name (str)",
        "got {} of type dict",
        "Use one of 'data', 'model'",
        ("data",),
    ),
    "a bool in a tuple": (
        (("data", True),),
        "by its index (int) or its name (str)",
        "got True",
        "Use one of",
        (("data", "model"),),
    ),
    "an unknown name in a tuple": (
        (("data", "m"),),
        "one of the mesh's axis names",
        "got 'm'",
        "Use one of",
        (("data", "model"),),
    ),
    "a deeper tuple": (
        (("data", ("model",)),),
        "a tuple inside a partition spec must hold mesh axes only",
        "got ('model',) in (('data', ('model',)),)",
        "List the axes of one dim side by side, such as ('data', 'model')",
        (("data", "model"),),
    ),
    "None in a tuple": (
        (("data", None),),
        "a tuple inside a partition spec must hold mesh axes only",
        "got None in (('data', None),)",
        "side by side, such as ('data', 'model')",
        (("data", "model"),),
    ),
    "an axis twice": (
        ("data", "data"),
        "a mesh axis may shard a tensor once",
        "got axis 'data' more than once in ('data', 'data')",
        "Keep it in one place, and write None",
        ("data", None),
    ),
    "an axis twice by other names": (
        ("model", (0, -1)),
        "may shard a tensor once",
        "got axis 'model' more than once",
        "write None",
        ("model", (0,)),
    ),
    "a bare name": (
        "data",
        "must be a tuple",
        "got 'data' of type str",
        "Write ('data',) to shard the first dim",
        ("data",),
    ),
    "a bare index": (
        1,
        "must be a tuple",
        "got 1 of type int",
        "Write (1,) to shard the first dim",
        (1,),
    ),
    "a bare wrong name": (
        "dat",
        "must be a tuple",
        "got 'dat' of type str",
        "Write ('data',) to shard the first dim",
        ("data",),
    ),
    "a bare bool": (True, "must be a tuple", "got True of type bool", "Write ('data',)", ("data",)),
    "no spec": (None, "must be a tuple", "got None of type NoneType", "or () to replicate", ()),
    "jax's spec": (
        jax.P("data"),
        "must be a tuple",
        "got P('data',) of type P",
        "Write ('data',)",
        ("data",),
    ),
    "an array": (
        np.array([0, 1]),
        "must be a tuple",
        "of type ndarray",
        "Write ('data',)",
        ("data",),
    ),
}


def spec_error(mesh: Any, spec: Any, error: type[Exception] = PartitionSpecError) -> str:
    """The message for a wrong spec; asserts that each function that takes specs gives the same."""
    doors = (
        lambda: Sharding.of(mesh, spec, 2),
        lambda: ShardingSpec(mesh, spec),
        lambda: validate_spec(mesh, spec),
    )
    messages = set()
    for door in doors:
        with pytest.raises(error) as caught:
            door()
        messages.add(str(caught.value))
    (message,) = messages
    assert message.endswith(".")
    assert "  " not in message
    assert not re.search(r"\{[a-z]", message), "an f-string without its f"
    return message


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_spec_refuses_is_explained_and_the_advice_works(case):
    spec, rule, got, advice, right = REFUSED[case]
    message = spec_error(MESH_4X2, spec)
    assert rule in message
    assert got in message
    assert advice in message
    Sharding.of(MESH_4X2, right, 2)
    ShardingSpec(MESH_4X2, right)


def test_a_refused_spelling_is_refused_even_after_an_equal_one_was_accepted():
    # True == 1 and 1.0 == 1, so a cache keyed on the spec as given would accept them.
    Sharding.of(MESH_4X2, (1,), 1)
    spec_error(MESH_4X2, (True,))
    spec_error(MESH_4X2, (1.0,))


def test_an_axis_twice_in_an_unnamed_mesh_is_named_by_its_index():
    assert "got axis 1 more than once in (1, -1)" in spec_error(Mesh(range(8), (4, 2)), (1, -1))


def test_a_name_for_an_unnamed_mesh():
    message = spec_error(Mesh(range(8), (4, 2)), ("data",))
    assert "only where the mesh has axis names" in message
    assert "got 'data' for the unnamed Mesh" in message
    assert "Use one of 0, 1, or pass axis_names to Mesh" in message
    Sharding.of(Mesh(range(8), (4, 2)), (0,), 1)
    Sharding.of(Mesh(range(8), (4, 2), ("data", "model")), ("data",), 1)


@pytest.mark.parametrize("wrong", [None, (4, 2), "data"])
def test_a_mesh_that_is_none(wrong):
    message = spec_error(wrong, (0,), MeshError)
    assert "a partition spec belongs to a Mesh" in message
    assert f"got {wrong!r} of type {type(wrong).__name__}" in message
    assert "Pass Mesh(device_ids, mesh_shape, axis_names)" in message
    Sharding.of(Mesh(device_ids=range(8), mesh_shape=(4, 2), axis_names=None), (0,), 1)


@pytest.mark.parametrize(
    ("spec", "ndim"), [(("data", None, None), 2), ((None,), 0), (("data", "model"), 1)]
)
def test_a_spec_longer_than_the_rank(spec, ndim):
    with pytest.raises(PartitionSpecError) as caught:
        Sharding.of(MESH_4X2, spec, ndim)
    message = str(caught.value)
    assert "must not have more entries than the tensor has dims" in message
    assert f"got {spec!r} with {len(spec)} entries for a tensor of rank {ndim}" in message
    assert f"Keep at most {ndim} entries" in message
    Sharding.of(MESH_4X2, spec[:ndim], ndim)


@pytest.mark.parametrize("method", ["padded_shape", "shard_shape", "indices"])
def test_a_shape_of_another_rank(method):
    sharding = Sharding.of(MESH_4X2, ("data",), 2)
    with pytest.raises(PartitionSpecError) as caught:
        getattr(sharding, method)((8, 4, 2))
    message = str(caught.value)
    assert "a sharding serves tensors of one rank" in message
    assert "got the shape (8, 4, 2) of rank 3 for Sharding.of(" in message
    assert "Build a sharding for it: Sharding.of(mesh, partition_spec, 3)" in message
    getattr(Sharding.of(MESH_4X2, ("data",), 3), method)((8, 4, 2))


# ShardingSpec


class OnlyDim:
    def dim(self) -> int:
        return 2


@pytest.mark.parametrize("tensor", [2, np.int64(2), np.zeros((3, 4)), OnlyDim()])
def test_can_apply_is_a_match_of_ranks(tensor):
    assert ShardingSpec(MESH_4X2, ("data", None)).can_apply(tensor)
    assert not ShardingSpec(MESH_4X2, ("data",)).can_apply(tensor)
    assert not ShardingSpec(MESH_4X2, ("data", None, None)).can_apply(tensor)


def test_can_apply_to_what_has_no_rank():
    spec = ShardingSpec(MESH_4X2, ("data", None))
    with pytest.raises(TypeError) as caught:
        spec.can_apply([[1, 2]])
    assert str(caught.value) == (
        "a rank is asked of a tensor, an array or an int; got [[1, 2]] of type list. "
        "Pass the tensor itself."
    )
    assert spec.can_apply(np.array([[1, 2]]))


def test_a_sharding_spec_is_a_hashable_value():
    spec = ShardingSpec(MESH_4X2, ["data", ["model"]])
    assert spec == ShardingSpec(MESH_4X2, ("data", ("model",)))
    assert hash(spec) == hash(ShardingSpec(MESH_4X2, ("data", ("model",))))
    assert spec != ShardingSpec(MESH_4X2, ("data", ("model",)), minibatch=True)
    assert not spec.minibatch
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises(FrozenInstanceError):
        spec.minibatch = True


def test_op_sharding_is_xlas_description():
    mesh = Mesh([3, 1, 2, 0], (2, 2), ("a", "b"))
    tiled = mesh.get_op_sharding(("b", "a"))
    assert tiled == OpSharding(ShardingType.TILED, (2, 2), (3, 2, 1, 0), False)
    partial = mesh.get_op_sharding(("b",))
    assert partial == OpSharding(ShardingType.PARTIAL, (2, 2), (2, 3, 0, 1), True)
    assert mesh.get_op_sharding((None, None)) == OpSharding(ShardingType.REPLICATED, (), (), False)
    with pytest.raises(PartitionSpecError, match="z"):
        mesh.get_op_sharding(("z",))
