"""What each device holds, against a numpy model, for random meshes, specs, shapes and dtypes.

The model is the placement rule itself. The device ids are reshaped to the mesh. A dim of size `n`
that is split over axes of `k` devices in all has blocks of `ceil(n / k)`, which the axes count with
the first axis slowest. The model works on bytes: every dtype and every NaN must be preserved.

The cases are the same in each run. With `SPMD_FRESH_EXAMPLES=1` in the environment,
`pytest packages/spmd-core/tests/sharding/test_sharding_properties.py` draws others; its option
`--hypothesis-seed=N` repeats a draw.
"""

import io
import itertools
import math
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from tiers import examples

import spmd_core as spmd
from spmd_core.marks.marking import start_upload
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import ShardingSpec, validate_spec
from spmd_core.sharding.sharding import Sharding, ShardingType, from_text
from spmd_core.tensor.shards import XLAShard

NUM_DEVICES = spmd.global_runtime_device_count()
DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
]
# torch reads pickles of these dtypes only if `torch.save` wrote them.
UNPICKLED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
PICKLED = [dtype for dtype in DTYPES if dtype not in UNPICKLED]
Dims = tuple[tuple[int, ...], ...]


def trying(number: int) -> Callable[[Any], Any]:
    """Settings for `number` cases of a property."""
    is_fixed = os.environ.get("SPMD_FRESH_EXAMPLES", "0") == "0"
    # Slow examples are no failure.
    return settings(
        max_examples=examples(number),
        deadline=None,
        derandomize=is_fixed,
        suppress_health_check=[HealthCheck.too_slow],
    )


# The model.


@dataclass
class Held:
    """What one device holds.

    Slices of the tensor, without padding; the shape of the block, with padding; and the rank among
    the devices that hold the same block.
    """

    index: tuple[slice, ...]
    block_shape: tuple[int, ...]
    replica_id: int


def model(mesh: Mesh, dims: Dims, shape: Sequence[int]) -> dict[int, Held]:
    """What each device holds, by device id, in the order of the mesh."""
    grid = np.array(mesh.device_ids.tolist()).reshape(mesh.mesh_shape)
    coordinates = np.indices(grid.shape)
    numbers = []  # for each dim, the index of each device's block
    sizes = []
    for axes, size in zip(dims, shape, strict=True):
        counts = [grid.shape[axis] for axis in axes]
        numbers.append(
            np.ravel_multi_index([coordinates[axis] for axis in axes], counts)
            if axes
            else np.zeros(grid.shape, int)
        )
        sizes.append(math.ceil(size / math.prod(counts)))
    blocks = {
        int(grid[place]): tuple(int(number[place]) for number in numbers)
        for place in np.ndindex(grid.shape)
    }
    found = {}
    for device, block in blocks.items():
        index = tuple(
            slice(min(i * b, n), min(i * b + b, n)) for i, b, n in zip(block, sizes, shape)
        )
        found[device] = Held(
            index, tuple(sizes), sum(other < device and blocks[other] == block for other in blocks)
        )
    return found


def as_bytes(t: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a uint8 array of shape `(*t.shape, t.element_size())`."""
    # A new tensor has stride 1 even if it is empty.
    flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1))
    return flat.view(torch.uint8).numpy().reshape(*t.shape, t.element_size())


def is_same(mine: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        mine.dtype == right.dtype
        and mine.device == right.device
        and np.array_equal(as_bytes(mine), as_bytes(right))
    )


def check_shards(shards: list[XLAShard], whole: torch.Tensor, mesh: Mesh, dims: Dims) -> None:
    """Asserts that the shards are those of the model, including padding with zeros."""
    held = model(mesh, dims, whole.shape)
    is_whole = all(mesh.mesh_shape[axis] == 1 for axes in dims for axis in axes)
    assert [shard.shard_device for shard in shards] == [f"CPU:{device}" for device in sorted(held)]
    for device, shard in zip(sorted(held), shards):
        right = held[device]
        block = np.zeros((*right.block_shape, whole.element_size()), np.uint8)
        inside = as_bytes(whole)[right.index]
        block[tuple(slice(n) for n in inside.shape)] = inside
        assert shard.data.dtype == whole.dtype and np.array_equal(as_bytes(shard.data), block)
        assert (
            shard.indices == (... if is_whole else [slice(s.start, s.stop, 1) for s in right.index])
            and shard.replica_id == right.replica_id
        )
        assert np.array_equal(as_bytes(shard.unpadded_data), inside)


# Random cases.


def mesh_shapes(most: int, axes: int) -> list[tuple[int, ...]]:
    shapes = itertools.chain.from_iterable(
        itertools.product(range(1, most + 1), repeat=n) for n in range(1, axes + 1)
    )
    return [shape for shape in shapes if math.prod(shape) <= most]


def meshes(most: int, axes: int, spare: int = 0) -> st.SearchStrategy[Mesh]:
    """Meshes over up to `most` of `most + spare` devices in any order, named or not."""
    shapes = mesh_shapes(most, axes)

    @st.composite
    def draw_mesh(draw: st.DrawFn) -> Mesh:
        shape = draw(st.sampled_from(shapes))
        ids = draw(st.permutations(range(most + spare)))[: math.prod(shape)]
        return Mesh(
            ids, shape, draw(st.sampled_from([None, ("data", "b", "c", "d")[: len(shape)]]))
        )

    return draw_mesh()


@st.composite
def axes_of_dims(draw: st.DrawFn, mesh: Mesh, ndim: int) -> Dims:
    """For each dim the axes that split it; an axis need not split any dim."""
    dims: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(len(mesh.mesh_shape)))):
        place = draw(st.integers(0, ndim))
        if place < ndim:
            dims[place].append(axis)
    return tuple(map(tuple, dims))


@st.composite
def spelled(draw: st.DrawFn, mesh: Mesh, dims: Dims) -> Any:
    """One of the specs that mean these axes.

    An axis is a name, an index from either end, or a numpy int. Several axes are a tuple or a list.
    A dim that is not split has None, an empty tuple or list, or at the end no entry.
    """
    num_axes = len(mesh.mesh_shape)

    def spelled_axis(axis: int) -> Any:
        names = [] if mesh.axis_names is None else [mesh.axis_names[axis]]
        return draw(st.sampled_from([axis, axis - num_axes, np.int64(axis), *names]))

    def entry(axes: Sequence[int]) -> Any:
        several = [spelled_axis(axis) for axis in axes]
        forms: list[Any] = [tuple(several), several]
        if not axes:
            forms.append(None)
        if len(axes) == 1:
            forms.append(several[0])
        return draw(st.sampled_from(forms))

    entries = [entry(axes) for axes in dims]
    while entries and not dims[len(entries) - 1] and draw(st.booleans()):
        entries.pop()
    return draw(st.sampled_from([tuple(entries), entries]))


@dataclass
class Case:
    """A mesh, a tensor's shape, for each dim the axes that split it, and a spec that says so."""

    mesh: Mesh
    shape: tuple[int, ...]
    dims: Dims
    spec: Any

    @property
    def sharding(self) -> Sharding:
        return Sharding.of(self.mesh, self.spec, len(self.shape))


@st.composite
def cases(
    draw: st.DrawFn,
    of_meshes: st.SearchStrategy[Mesh],
    sizes: st.SearchStrategy[int],
    most_dims: int = 4,
) -> Case:
    mesh = draw(of_meshes)
    shape = tuple(draw(st.lists(sizes, max_size=most_dims)))
    dims = draw(axes_of_dims(mesh, len(shape)))
    return Case(mesh, shape, dims, draw(spelled(mesh, dims)))


@st.composite
def tensors(
    draw: st.DrawFn, shape: Sequence[int], dtypes: Sequence[torch.dtype] = DTYPES
) -> torch.Tensor:
    """A CPU tensor of random bytes, with a random order of its dims in memory."""
    dtype = draw(st.sampled_from(dtypes))
    order = draw(st.permutations(range(len(shape))))
    in_memory = torch.empty([shape[dim] for dim in order], dtype=dtype)
    bits = np.random.default_rng(draw(st.integers(0, 2**32))).integers(
        0, 2 if dtype == torch.bool else 256, in_memory.nbytes, np.uint8
    )
    in_memory.view(-1).view(torch.uint8).copy_(torch.from_numpy(bits))
    return in_memory.permute([order.index(dim) for dim in range(len(shape))])


ANY_CASE = cases(meshes(16, 4, spare=4), st.integers(0, 20))
DEVICE_MESHES = meshes(NUM_DEVICES, 3)
DEVICE_CASE = cases(DEVICE_MESHES, st.integers(0, 9), 3)


# Shardings, without a device.


@trying(150)
@given(ANY_CASE)
def test_any_spelling_gives_the_intended_axes(case):
    assert case.sharding.dims == case.dims
    assert len(case.sharding.partition_spec) == len(case.shape)
    assert Sharding.of(case.mesh, case.sharding.partition_spec, len(case.shape)) is case.sharding
    assert validate_spec(case.mesh, case.spec) == case.dims[: len(case.spec)]
    assert ShardingSpec(case.mesh, case.spec).partition_spec == tuple(
        tuple(entry) if isinstance(entry, list) else entry for entry in case.spec
    )


@trying(300)
@given(ANY_CASE)
def test_any_device_holds_what_the_model_says(case):
    held, sharding = list(model(case.mesh, case.dims, case.shape).values()), case.sharding
    tiles = [math.prod(case.mesh.mesh_shape[axis] for axis in axes) for axes in case.dims]
    assert sharding.indices(case.shape) == tuple(device.index for device in held)
    assert sharding.replica_ids() == tuple(device.replica_id for device in held)
    assert {sharding.shard_shape(case.shape)} == {device.block_shape for device in held}
    assert sharding.padded_shape(case.shape) == tuple(
        n * tile for n, tile in zip(held[0].block_shape, tiles)
    )
    assert list(sharding.tiles) == tiles and sharding.num_shards == math.prod(tiles)
    copies = 1 + max(device.replica_id for device in held)
    kind = (
        ShardingType.REPLICATED
        if math.prod(tiles) == 1
        else ShardingType.TILED
        if copies == 1
        else ShardingType.PARTIAL
    )
    assert sharding.type is kind and sharding.is_replicated == (kind is ShardingType.REPLICATED)


@trying(150)
@given(ANY_CASE)
def test_the_blocks_of_one_replica_cover_the_tensor_exactly_once(case):
    sharding = case.sharding
    for replica in range(case.mesh.size() // sharding.num_shards):
        times_held = np.zeros(case.shape, dtype=int)
        holders = [
            index
            for index, number in zip(sharding.indices(case.shape), sharding.replica_ids())
            if number == replica
        ]
        assert len(holders) == sharding.num_shards
        for index in holders:
            times_held[index] += 1
        assert (times_held == 1).all()


@trying(200)
@given(ANY_CASE)
def test_any_text_is_the_one_that_xla_prints_and_reads(case):
    sharding = case.sharding
    assert sharding.text == xla_text(case.mesh, case.dims)
    again = XLA_SHARDING.from_string(sharding.text)
    assert str(again) == sharding.text
    if not sharding.is_replicated:
        assert (
            list(again.tile_assignment_devices()) == sharding.tile_assignment.reshape(-1).tolist()
        )


XLA_SHARDING = type(NamedSharding(AbstractMesh((1,), ("a",)), jax.P())._to_xla_hlo_sharding(1))


def xla_text(mesh: Mesh, dims: Dims) -> str:
    """What jaxlib prints for jax's sharding of the same spec.

    The ids in it are replaced by those of the mesh and listed one by one.
    """
    names = tuple(f"axis{index}" for index in range(len(mesh.mesh_shape)))
    spec = jax.P(*(tuple(names[axis] for axis in axes) for axes in dims))
    sharding = NamedSharding(AbstractMesh(mesh.mesh_shape, names), spec)._to_xla_hlo_sharding(
        len(dims)
    )
    if sharding.is_replicated():
        return str(sharding)
    ids = mesh.device_ids[np.asarray(sharding.tile_assignment_devices())].reshape(
        sharding.tile_assignment_dimensions()
    )
    if sharding.replicate_on_last_tile_dim():
        ids.sort(axis=-1)
    proto = sharding.to_proto()
    listed = type(proto)()
    listed.type = proto.type
    listed.tile_assignment_dimensions = list(ids.shape)
    listed.tile_assignment_devices = ids.reshape(-1).tolist()
    listed.replicate_on_last_tile_dim = sharding.replicate_on_last_tile_dim()
    return str(XLA_SHARDING.from_proto(listed))


@trying(100)
@given(ANY_CASE)
def test_a_sharding_read_from_its_text_places_the_same_blocks(case):
    sharding = case.sharding
    again = from_text(sharding.text, len(case.shape))
    assert again.text == sharding.text
    if not sharding.is_replicated:  # a replicated sharding's text names no devices
        ours, theirs = (
            dict(zip(s.mesh.device_ids.tolist(), zip(s.indices(case.shape), s.replica_ids())))
            for s in (sharding, again)
        )
        assert ours == theirs


@trying(100)
@given(ANY_CASE, st.booleans())
def test_meshes_shardings_and_specs_come_back_from_pickles_and_text(case, minibatch):
    spec = ShardingSpec(case.mesh, case.spec, minibatch)
    mesh_again, sharding_again, spec_again = pickle.loads(
        pickle.dumps((case.mesh, case.sharding, spec))
    )
    assert mesh_again == case.mesh == Mesh.from_str(str(case.mesh)) and hash(mesh_again) == hash(
        case.mesh
    )
    assert sharding_again is case.sharding and spec_again == spec and hash(spec_again) == hash(spec)


@trying(150)
@given(cases(DEVICE_MESHES, st.integers(0, 9)))
def test_any_sharding_has_placements_that_mean_it(case):
    placements = spmd.dtensor.placements_of(case.sharding)
    mesh, spec = spmd.dtensor.partition_spec_of(
        spmd.dtensor.to_device_mesh(case.mesh), placements, len(case.shape)
    )
    again = Sharding.of(mesh, spec, len(case.shape))
    # Placements do not keep the position of an axis of size 1 among the axes of a dim. Such an axis
    # splits nothing.
    splitting = [tuple(axis for axis in axes if mesh.mesh_shape[axis] > 1) for axes in again.dims]
    assert mesh == case.mesh and splitting == [
        tuple(axis for axis in axes if mesh.mesh_shape[axis] > 1) for axes in case.dims
    ]
    assert (
        again.indices(case.shape) == case.sharding.indices(case.shape)
        and again.replica_ids() == case.sharding.replica_ids()
    )


# Tensors on devices.


@trying(400)
@given(DEVICE_CASE, st.data())
def test_any_marked_tensor_lies_as_the_model_says(case, data):
    whole = data.draw(tensors(case.shape))
    x = spmd.mark_sharding(whole.to("xla"), case.mesh, case.spec)
    assert x.sharding is case.sharding
    check_shards(x.local_shards, whole, case.mesh, case.dims)
    assert is_same(x.cpu(), whole)


@pytest.mark.skipif(NUM_DEVICES == 1, reason="one device holds the whole tensor")
@trying(200)
@given(DEVICE_CASE, st.data())
def test_blocks_written_on_each_device_are_the_tensor(case, data):
    assume(not case.sharding.is_replicated)  # refused by `load_local_shards_`
    dtype = data.draw(st.sampled_from(DTYPES))
    old, new = (data.draw(tensors(case.shape, [dtype])) for _ in range(2))
    x = spmd.mark_sharding(old.to("xla"), case.mesh, case.spec)
    shards = x.local_shards
    held = model(case.mesh, case.dims, case.shape)
    for device, shard in zip(sorted(held), shards):
        shard.unpadded_data = new[held[device].index]
    x.load_local_shards_(data.draw(st.permutations(shards)))
    assert is_same(x.cpu(), new) and x.sharding is case.sharding
    check_shards(x.local_shards, new, case.mesh, case.dims)


@trying(150)
@given(DEVICE_CASE, st.data(), st.booleans(), st.sampled_from(["pickle", "save", "parameter"]))
def test_a_tensor_comes_back_from_a_pickle_whole_and_unmarked(case, data, is_on_device, form):
    whole = data.draw(tensors(case.shape, PICKLED if form == "pickle" else DTYPES))
    x = spmd.mark_sharding(whole.to("xla"), case.mesh, case.spec)
    if is_on_device:
        start_upload(x)
    if form == "parameter":
        x = torch.nn.Parameter(x, requires_grad=whole.is_floating_point())
    if form == "pickle":
        again = pickle.loads(pickle.dumps(x))
    else:
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        again = torch.load(file, weights_only=True)
    assert (
        type(again) is type(x)
        and again.device.type == "xla"
        and again.requires_grad == x.requires_grad
        and again.sharding is None
    )
    assert again.stride() == x.stride() and is_same(again.detach().cpu(), whole)


def live_through(
    data: Any, whole: torch.Tensor, of_meshes: st.SearchStrategy[Mesh], steps: int
) -> None:
    """Marks, clears, uploads and reads one tensor in random order.

    Asserts the tensor's value, and after some marks its blocks.
    """
    x = whole.to("xla")
    for step in data.draw(
        st.lists(
            st.sampled_from(["mark", "mark", "mark", "clear", "upload", "read"]),
            min_size=2,
            max_size=steps,
        )
    ):
        if step == "mark":
            mesh = data.draw(of_meshes)
            dims = data.draw(axes_of_dims(mesh, whole.dim()))
            spmd.mark_sharding(x, mesh, data.draw(spelled(mesh, dims)))
            if data.draw(st.booleans()):  # reading the shards puts the tensor on the devices
                check_shards(x.local_shards, whole, mesh, dims)
        elif step == "clear":
            assert spmd.clear_sharding(x).sharding is None and x.partition_spec is None
        elif step == "upload":
            start_upload(x)
        else:
            assert is_same(x.cpu(), whole)
    assert is_same(x.cpu(), whole)


# Sizes that divide evenly need no padding. A change of padding takes a program for each shape.
EVEN = 24
EVEN_MESHES = DEVICE_MESHES.filter(lambda mesh: EVEN % mesh.size() == 0)


@trying(250)
@given(st.data(), st.lists(st.sampled_from([0, EVEN]), max_size=2))
def test_a_tensor_keeps_its_value_whatever_its_marks(data, shape):
    live_through(data, data.draw(tensors(shape)), EVEN_MESHES, 6)


@trying(30)
@given(st.data(), st.lists(st.integers(0, 9), max_size=3))
def test_a_tensor_of_any_shape_keeps_its_value_whatever_its_marks(data, shape):
    live_through(data, data.draw(tensors(shape)), DEVICE_MESHES, 4)


# Programs.


@trying(50)
@given(st.data(), st.lists(st.integers(0, 9), max_size=3))
def test_a_program_over_marks_of_any_meshes_computes_the_same(data, shape):
    """Two inputs and a constrained value, each with its own mesh, which is also a result.

    The partitioner chooses the layout of the other result.
    """
    given, marks = [], []
    for _ in range(3):
        mesh = data.draw(DEVICE_MESHES)
        dims = data.draw(axes_of_dims(mesh, len(shape)))
        marks.append((mesh, dims, data.draw(spelled(mesh, dims))))
    for mesh, _, spec in marks[:2]:
        whole = torch.from_numpy(np.random.default_rng(len(given)).integers(-9, 9, shape)).float()
        given.append((whole, spmd.mark_sharding(whole.to("xla"), mesh, spec)))
    (a, x), (b, y) = given
    mesh, dims, spec = marks[2]
    z = spmd.mark_sharding(x + y, mesh, spec)
    free = (z * 2).neg_()
    spmd.sync()
    check_shards(z.local_shards, a + b, mesh, dims)
    # Not compared by bytes: XLA sometimes gathers by adding zeros, where -0 becomes 0.
    assert torch.equal(free.cpu(), (a + b) * -2)
    check_text(free)


def check_text(x: torch.Tensor) -> None:
    """Asserts that the text of the partitioner's choice tells which device holds which block."""
    chosen = from_text(x.sharding_spec, x.dim())
    indices = dict(zip(chosen.mesh.device_ids.tolist(), chosen.indices(tuple(x.shape))))
    for shard in x._handle.value.data.addressable_shards:
        lies = tuple(slice(*part.indices(n)[:2]) for part, n in zip(shard.index, x.shape))
        assert lies == (
            tuple(slice(0, n) for n in x.shape)
            if chosen.is_replicated
            else indices[shard.device.id]
        )
