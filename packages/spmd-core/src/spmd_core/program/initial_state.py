"""Makes the initial value of state that is created inside a cut an input of the program.

An optimizer creates its state in its first step and updates it there: `zeros_like(p)`, then
`lerp_`. Recorded like that, the first step would be another program than all later steps, whose
state is an input. So the program of the first step takes the zeros as an input, too; they are
created shard by shard just before it runs, and donated to it. State is a storage that an operation
of the cut updates in place, that a tensor still references at the cut, and whose initial value is

- a constant, from `zeros_like`, `full`, `empty` and the like; or
- a copy of an input that the cut updates, too: a moving average of parameters, or a wide copy of
  them.

The same holds for a referenced constant or copy that no operation reads: state that an optimizer
creates before it reads a value in the middle of its first step, or the copy of a frozen parameter;
and for a referenced constant of one element, such as the scale of a `GradScaler`. Any other
constant that is only read stays in the program, where XLA folds it.
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import torch

from spmd_core import dtypes
from spmd_core.counters import ProgramRecord
from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import Row
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Entry, OpResult, Value
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.leaves import (
    convert,
    host_placement,
    marked_placement,
    row_placement,
    target_placement,
)
from spmd_core.program.program import explained
from spmd_core.program.program_graph import RecordedGraph, stored_shape
from spmd_core.runtime import buffers, constants, devices, in_flight
from spmd_core.runtime.jax_sharding import device_ids_of

# Up to this size, a constant without a known placement is replicated. On several devices, a larger
# one stays in the program, where the partitioner chooses its sharding.
_REPLICATED_BYTES = 1 << 20


@dataclass(frozen=True)
class Beginning:
    """The initial value of state, which is the `data` of the program's input until it runs.

    Attributes:
        number: the value of all elements, 0-dim; None for a copy.
        source: the input that is copied; None for a constant.
        dtypes: the dtypes to which the copy is converted, one after another.
    """

    number: torch.Tensor | None = None
    source: Value | None = None
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class State:
    """The state that is created in a cut.

    Attributes:
        inputs: for each recorded initial value, the leaf that replaces it.
        first: for each storage without an earlier value that is updated in place, the leaf with
            its initial value.
        held: for each storage that is not updated, and is no result of the program, the leaf that
            is its value.
    """

    inputs: Mapping[Value, Value] = field(default_factory=dict)
    first: Mapping[Storage, Value] = field(default_factory=dict)
    held: Mapping[Storage, Value] = field(default_factory=dict)

    @property
    def sources(self) -> list[Value]:
        """The inputs that are copied."""
        return [leaf.data.source for leaf in self.made if leaf.data.source is not None]

    @property
    def made(self) -> list[Value]:
        """The leaves whose arrays are made: for those that are rows of a stack, the stack."""
        return [*dict.fromkeys(map(_whole, self.inputs.values()))]


def find_state(
    live: Sequence[Storage], nodes: Sequence[Value], returned: Collection[Storage] = ()
) -> State:
    """Finds the state among the storages that a cut computes. Changes nothing.

    Args:
        live: the storages.
        nodes: the operations that they need, in the order of recording.
        returned: storages of which each run of the program makes new ones, so they are no state.
    """
    first: dict[Storage, Value] = {}
    recorded: dict[Storage, tuple[Value, Beginning]] = {}
    given = set(live)
    for storage in live:
        if storage.committed is None:
            value, beginning = _first_value(storage.value)
            if beginning is not None and storage not in returned:
                recorded[storage] = value, beginning
            elif beginning is None and value.data is not None:
                first[storage] = value
    if not recorded:
        return State(first=first)
    updated = [s for s in live if s.committed is not None]
    results = {s.value for s in live}
    read, local = _read(nodes, {value for value, _ in recorded.values()}), _local(nodes)
    inputs: dict[Value, Value] = {}
    held: dict[Storage, Value] = {}
    for storage, (value, beginning) in recorded.items():
        if (storage.value.parent or storage.value) in local:
            continue
        is_held = value is storage.value
        if is_held:
            is_scalar = beginning.source is None and value.spec.num_elements == 1
            is_input = value not in read or is_scalar
        else:
            is_input = value in read and value not in results and _is_state(beginning, given)
        placement = _placement(storage, value, beginning, updated) if is_input else None
        if placement is None:
            continue
        if value not in inputs:
            leaf = Value.leaf(value.spec, beginning, placement, weakref.ref(storage))
            if hasattr(value, "origin"):
                leaf.origin = value.origin
            inputs[value] = leaf
            if is_held:
                held[storage] = leaf
        if not is_held:
            first[storage] = inputs[value]
    if len(held) == len(live):  # without a program, they would be no part of a step
        return State(first=first)
    return State(inputs, first, held)


def make(
    state: State,
    leaves: Sequence[Value],
    targets: Sequence[Placement],
    graph: RecordedGraph,
    record: ProgramRecord,
) -> None:
    """Creates the arrays of the leaves with initial values. Does not wait.

    Args:
        state: the state that is created.
        leaves: the program's inputs.
        targets: the placements of these inputs.
        graph: the program's graph.
        record: the program's record.

    Raises:
        DeviceMemoryError: a device's memory is too small.
    """
    placement_of = dict(zip(leaves, targets))
    lies = {
        leaf: placement_of.get(leaf) or target_placement(leaf.placement, graph.device_ids)
        for leaf in state.made
    }
    filled = [leaf for leaf in lies if leaf.data.source is None]
    try:
        arrays = dict(zip(filled, constants.arrays_of([_constant(x, lies[x]) for x in filled])))
        for leaf, target in lies.items():
            leaf.data = arrays[leaf] if leaf in arrays else _copy(leaf, target)
            leaf.placement = target
    except in_flight.FAILURES as error:
        raise explained(error, graph, record) from error
    for leaf in state.inputs.values():
        if leaf.data.__class__ is Row:
            leaf.placement = row_placement(_whole(leaf).placement, leaf.placement.sharding)


def _whole(leaf: Value) -> Value:
    """The stack of which a leaf is a row; another leaf itself."""
    return leaf.data.stack.value if leaf.data.__class__ is Row else leaf


def _constant(leaf: Value, target: Placement) -> constants.Constant:
    """The constant with which state begins."""
    shape = stored_shape(leaf.spec, target)
    return constants.Constant(leaf.data.number, shape, target.device_sharding)


def _copy(leaf: Value, target: Placement) -> jax.Array:
    """The copy with which state begins."""
    beginning, shape = leaf.data, stored_shape(leaf.spec, target)
    sharding, source = target.device_sharding, beginning.source
    own = convert(source, target_placement(source.placement, device_ids_of(sharding)))
    if own.shape != shape:  # with another padding
        own = buffers.reshard(own, sharding, leaf.spec.shape, shape)
    return buffers.copied(own, tuple(map(dtypes.to_jax, beginning.dtypes)), sharding)


def _first_value(value: Value) -> tuple[Value, Beginning | None]:
    """The value before a storage's first update, and its form as an initial value, if it has one.

    It is the given value itself if no operation updates it in place.
    """
    beginning = _beginning(value)
    while beginning is None and value.data is None:
        before = _replaced(value)
        if before is None:
            break
        value, beginning = before, _beginning(before)
    return value, beginning


def _is_state(beginning: Beginning, live: set[Storage]) -> bool:
    """Whether a storage with this initial value is likely to be state, not a copy of step data.

    A copy counts as state if the cut updates its source, too, or no tensor references the source
    any more, as after the conversion of a model.
    """
    source = beginning.source
    owner = None if source is None or source.owner is None else source.owner()
    return owner is None or (owner in live and owner.value is not source)


def _replaced(value: Value) -> Value | None:
    """The value that an operation in place, or a mark, replaces; None for any other operation."""
    node, index = (value.parent, value.index) if isinstance(value, OpResult) else (value, 0)
    assert node is not None
    entry = node.entry
    if entry.replaces and not entry.random:
        return node.inputs[entry.replaces[index]]
    is_mark = entry.sharding is not None and entry.traits.elements is Elements.SAME
    return node.inputs[0] if is_mark else None


def _beginning(value: Value) -> Beginning | None:
    """The form of a pending value as an initial value; None if it cannot be one."""
    if value.data is not None:
        return None
    conversions: list[torch.dtype] = []
    while value.data is None and value.parent is None:
        entry = value.entry
        if entry.traits.fill is not None:
            number = _number(value, entry.traits.fill)
            if number is None:
                return None
            for dtype in reversed(conversions):
                number = number.to(dtype)
            return Beginning(number)
        position = _copied(value, entry)
        if position is None:
            return None
        conversions.append(value.spec.dtype)
        value = value.inputs[position]
    if value.data is None or value.placement.manual is not None or value.placement.room is not None:
        return None
    # jax rounds only floats as torch does.
    is_exact = all(d.is_floating_point for d in conversions) and value.spec.dtype.is_floating_point
    if not is_exact and {*conversions, value.spec.dtype} != {value.spec.dtype}:
        return None
    return Beginning(source=value, dtypes=tuple(reversed(conversions)))


def _copied(value: Value, entry: Entry) -> int | None:
    """The position of the input of the same shape whose elements an operation copies, if it does.

    None for an operation with index checks, which must stay in the program.
    """
    traits = entry.traits
    if entry.indices or traits.elements not in (Elements.SAME, Elements.REPEATED):
        return None
    is_same = value.inputs[traits.source].spec.shape == value.spec.shape
    return traits.source if is_same else None


def _number(node: Value, fill: float | str) -> torch.Tensor | None:
    """The number with which an operation fills its result, 0-dim; None if a tensor has it."""
    if isinstance(fill, str):
        assert node.entry.arguments is not None
        given = node.entry.arguments[fill]
        # A type in place of a number means that the number is an input of the program.
        fill = node.numbers[0] if isinstance(given, type) else given
    if not isinstance(fill, (bool, int, float, complex)):
        return None
    return torch.full((), fill, dtype=node.spec.dtype, device="cpu")


def _read(nodes: Sequence[Value], values: set[Value]) -> set[Value]:
    """Those of these values that operations read; a copy into a tensor does not read it."""
    read: set[Value] = set()
    for node in nodes:
        for position, x in enumerate(node.inputs):
            if x in values and x not in read:
                copied = _copied(node, node.entry) if node.entry.replaces else None
                if copied is None or copied == position:
                    read.add(x)
    return read


def _local(nodes: Sequence[Value]) -> set[Value]:
    """The operations whose results are local to a manual region."""
    local: set[Value] = set()
    if any(node.entry.border is not None for node in nodes):
        for node in nodes:
            border = node.entry.border
            if border is not None:
                is_local = not border.is_exit
            else:
                is_local = any((x.parent or x) in local for x in node.inputs)
            if is_local:
                local.add(node)
    return local


def _placement(
    storage: Storage, value: Value, beginning: Beginning, updated: Iterable[Storage]
) -> Placement | None:
    """The placement of an initial value: that of its mark, of its source, or of its parameter.

    The parameter is the updated storage of the same shape. None if the partitioner must choose.
    """
    if 0 in value.spec.shape:
        return None
    if storage.sharding is not None:
        return marked_placement(storage.sharding)
    source, shape = beginning.source, value.spec.shape
    alike = (
        [source.placement]
        if source is not None
        else [
            s.committed.placement
            for s in updated
            if s.committed is not None and s.spec.shape == shape
        ]
    )
    found = {_device_sharding(placement) for placement in alike}
    if len(found) == 1:
        (sharding,) = found
        if sharding is None:
            return host_placement()
        if _is_even(sharding, shape):
            return Placement.of(sharding, None)
    is_small = value.spec.num_bytes <= _REPLICATED_BYTES or len(devices.all_devices()) == 1
    return host_placement() if is_small else None


def _device_sharding(placement: Placement) -> jax.sharding.NamedSharding | None:
    """The sharding on devices of data with this placement; None if it will be replicated."""
    if placement.sharding is not None:
        return marked_placement(placement.sharding).jax_sharding
    return placement.jax_sharding


def _is_even(sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether the sharding splits the shape evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
