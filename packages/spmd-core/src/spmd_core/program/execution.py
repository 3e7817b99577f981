"""The cut: computes everything that is pending and still held, in one program."""

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import torch

from spmd_core import metrics, source_lines
from spmd_core.config import config
from spmd_core.errors import ProgramError
from spmd_core.graph.placement import Placement
from spmd_core.graph.repetition import result_of
from spmd_core.graph.storage import Storage, lock, take_failed, take_pending
from spmd_core.graph.values import Part, Value, origin_of
from spmd_core.program import compile_cache, growing_sizes, index_checks, verification
from spmd_core.program.leaves import (
    convert,
    device_placement,
    marked_placement,
    move,
    refuse_local,
    target_placement,
)
from spmd_core.program.program import Program
from spmd_core.program.program_graph import Graph, Leaf, Node, Output, padded_shape
from spmd_core.runtime import buffers
from spmd_core.runtime.jax_sharding import default_device_ids, device_ids_of
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding

_by_serial = operator.attrgetter("serial")

# Context managers around the cut that ends a step; they are exited even if the cut fails. A module
# that this one must not import registers here to take part in every step.
around_step: list[Callable[[], AbstractContextManager[None]]] = []


@dataclass(frozen=True)
class CutGuard:
    """What a region of the user's program (`steps.compile`) requires of the cuts inside it.

    Attributes:
        label: the beginning of the names of programs that are compiled inside.
        before_cut: called before a cut; if it raises, everything stays pending.
        before_program: called with the program's key, before the program is looked up or compiled;
            if it raises, the cut has failed.
    """

    label: str
    before_cut: Callable[[], None]
    before_program: Callable[[compile_cache.Key], None]


# Set and reset by the region (`steps.compile`); None outside of any region.
cut_guard: CutGuard | None = None


def cut(*, wait: bool = False, wanted: Storage | None = None) -> None:
    """Computes every pending tensor that is still held, in one program.

    Does not wait for the devices unless `wait` is true. Where the program fails, the tensors that
    have no pending operation in common run as programs of their own, so that a failure stays with
    the tensors that it is about. These stay pending, with every write that was made to them: a
    later cut leaves them out, and reading one tries again.

    Args:
        wait: whether to wait until the devices are done.
        wanted: a storage that is about to be read: only a failure of its own program raises.

    Raises:
        DeviceMemoryError, ProgramError: a program could not be compiled or run.
        IndexRangeError: with `wait`, a program under `config.check_indices` found an index outside
            its dim.
    """
    with lock:
        live = take_pending()
        try:
            if live and cut_guard is not None:
                cut_guard.before_cut()
        except BaseException:
            _request(live)
            raise
        if live:
            metrics.count("cuts")
            try:
                _execute(live)
            except Exception as error:
                _execute_apart(live, error, wanted)
            except BaseException:  # an interruption, which loses nothing
                _request(live)
                raise
    if wait:
        buffers.in_flight.wait_all()
        index_checks.raise_if_found()


def cut_pieces(live: list[Storage], nodes: list[Value], positions: list[int], period: int) -> None:
    """Computes the first operations that are pending, one program for each piece of a repetition.

    The pieces do the same, so that they share a program. Does not wait.

    Args:
        live: what is pending.
        nodes: all operations that it needs, in the order of recording.
        positions: where each piece ends, ascending; what follows the last one stays pending.
        period: after how many operations they repeat themselves.

    Raises:
        DeviceMemoryError, ProgramError: a program could not be compiled or run. All pieces that did
            not run are still pending.
    """
    position_of = {node: i for i, node in enumerate(nodes)}
    last_use: dict[Value, int] = {}
    for i, node in enumerate(nodes):
        for value in node.inputs:
            last_use[value] = i
    holder = {s.value: s for s in live}
    # An intermediate state lies as the tensor whose last state is computed by the same operation.
    alike: dict[tuple[int, int, Any], Storage] = {}
    for s in live:
        node, index = result_of(s.value)
        alike[position_of[node] % period, index, node.entry] = s
    passing: list[list[Storage]] = [[] for _ in positions]
    for value in {**last_use, **dict.fromkeys(holder)}:
        node, index = result_of(value)
        made = position_of.get(node)
        if made is None or made >= positions[-1]:
            continue
        piece = bisect_right(positions, made)
        if value in holder:
            passing[piece].append(holder[value])
        elif last_use[value] >= positions[piece]:
            state = Storage(value, value.spec)
            like = alike.get((made % period, index, node.entry))
            if like is not None:
                state.sharding, state.committed = like.sharding, like.committed
            passing[piece].append(state)
    for storages in passing:
        if storages:
            metrics.count("cuts")
            metrics.count("automatic_cuts")
            # A later piece may read the same leaves.
            _execute(
                sorted(storages, key=lambda s: position_of[result_of(s.value)[0]]), donates=False
            )
            storages.clear()


def roll_back() -> int:
    """Gives up the pending writes whose programs failed: the tensors are as after the last cut.

    For a program that catches an error and goes on, such as one that runs out of memory and then
    takes a smaller batch. Without this call nothing is lost, and whatever uses these writes fails
    again. New tensors, which have no earlier value, stay as they are. Does not wait.

    Returns:
        How many tensors have an earlier value again.
    """
    with lock:
        count = 0
        for storage in take_failed():
            before = storage.committed
            if before is None or _is_deleted(before):
                storage.fail()
            else:
                storage.write(before)
                count += 1
        return count


def _request(live: list[Storage]) -> None:
    for storage in live:
        storage.request()


def _is_deleted(value: Value) -> bool:
    """Whether the value's buffer went to a program that failed."""
    return isinstance(value.data, jax.Array) and value.data.is_deleted()


def end_step(*, wait: bool = False) -> None:
    """The cut that ends a step: `cut` inside the context managers of `around_step`."""
    metrics.count("steps")
    with ExitStack() as stack:
        for enter in around_step:
            stack.enter_context(enter())
        cut(wait=wait)


def _execute(live: list[Storage], *, donates: bool = True) -> None:
    """Starts the program that computes these storages, and stores its results.

    Args:
        live: the storages.
        donates: whether no other pending operation reads the same leaves, so that this program may
            take over their buffers.
    """
    planned = plan(live, donates=donates)
    live = planned.live
    leaves, targets, numbers, donated = (
        planned.leaves,
        planned.targets,
        planned.numbers,
        planned.key.donated,
    )
    for leaf in leaves:
        if _is_deleted(leaf):
            raise ProgramError(
                f"the data of a {leaf.spec!r} tensor went to a program that failed after its start,"
                " and what is computed from it is lost. Load these tensors anew, or from a "
                "checkpoint."
            )
    if cut_guard is not None:
        cut_guard.before_program(planned.key)
    floats = [x for x in numbers if x.__class__ is float]
    ints = [int(x) for x in numbers if x.__class__ is int or x.__class__ is bool]
    complexes = [x for x in numbers if x.__class__ is complex]
    bounded = planned.bounded()
    if bounded is None:
        program = planned.program()
    else:
        program = compile_cache.get(
            bounded.key, lambda: Program(bounded.graph, f"{planned.name}_{bounded.key.bound}")
        )
        targets = bounded.targets
        ints.append(bounded.number)
    arrays = [
        leaf.data if leaf.placement is target else convert(leaf, target)
        for leaf, target in zip(leaves, targets)
    ]
    results = program.run(floats, ints, complexes, arrays)
    metrics.count("executions")
    if config.verify_programs and len(planned.key.device_ids) > 1:
        verification.verify(program, (floats, ints, complexes), arrays, results)
    if donated:
        metrics.count("donated_bytes", sum(leaves[i].spec.num_bytes for i in donated))
    for storage, array, placement in zip(live, results, program.out_placements):
        _commit(storage, array, placement)


def _commit(storage: Storage, array: jax.Array, placement: Placement) -> None:
    """Makes a result the storage's computed value, resharded if the mark has other devices."""
    sharding = storage.sharding
    value = storage.value
    value.settle(array, placement, None)
    if (
        sharding is not None
        and placement.manual is None
        and placement.with_room(None) is not marked_placement(sharding)
    ):
        move(value, marked_placement(sharding))
    storage.write(value)


def _execute_apart(live: list[Storage], error: Exception, wanted: Storage | None) -> None:
    """After the common program of these storages failed, runs one program for each group.

    Raises the error of the group that has `wanted`, or of the first group that fails if nothing is
    wanted.
    """
    groups = _groups(live)
    # A region of `compile` is about one program.
    if len(groups) == 1 or cut_guard is not None:
        for storage in live:
            storage.fail()
        raise error
    metrics.count("cuts_run_apart")
    raised = None
    waiting = list(groups)
    try:
        for group in groups:
            try:
                _execute(group, donates=False)  # the others may read the same leaves
            except Exception as again:
                for storage in group:
                    storage.fail()
                if wanted in group or (wanted is None and raised is None):
                    raised = again
            waiting.remove(group)
    except BaseException:
        _request([storage for group in waiting for storage in group])
        raise
    if raised is not None:
        raised.add_note(
            f"The other tensors that were pending, {len(groups) - 1} group(s) of them, ran apart."
        )
        raise raised


def _groups(live: list[Storage]) -> list[list[Storage]]:
    """The storages, together where they have a pending operation in common; in the given order."""
    group_of: dict[Value, list[Storage]] = {}
    groups: list[list[Storage]] = []
    for storage in live:
        nodes, _ = collect([storage])
        merged = [storage]
        for node in nodes:
            other = group_of.get(node)
            if other is not None and other is not merged:
                groups = [g for g in groups if g is not other]
                other.extend(merged)
                for known, group in group_of.items():
                    if group is merged:
                        group_of[known] = other
                merged = other
            group_of[node] = merged
        groups = [*(g for g in groups if g is not merged), merged]
    return groups


@dataclass
class Plan:
    """What a cut is about to run. Making a plan changes nothing: `debugging` shows plans unrun.

    Attributes:
        key: the program's key.
        live: the storages that receive the results, in the order of the results.
        nodes: the recorded operations, in the order of recording.
        node_inputs: for each node, the value numbers of its inputs (see `program_graph.Node`).
        leaves: the program's inputs.
        targets: how each leaf must lie on the program's devices.
        numbers: the Python numbers that are inputs of the program, in the order of the nodes.
    """

    key: compile_cache.Key
    live: list[Storage]
    nodes: list[Value]
    node_inputs: list[list[int]]
    leaves: list[Value]
    targets: tuple[Placement, ...]
    numbers: list[Any]

    def graph(self) -> Graph:
        """The graph to lower; only needed if the program is not in the cache."""
        key = self.key
        origins = key.origins or (None,) * len(self.nodes)
        return Graph(
            tuple(
                Leaf(leaf.spec, target, origin_of(leaf))
                for leaf, target in zip(self.leaves, self.targets)
            ),
            tuple(
                Node(node.entry, tuple(inputs), origin)
                for node, inputs, origin in zip(self.nodes, self.node_inputs, origins)
            ),
            tuple(
                Output(number, s.spec, placement)
                for s, (number, _, placement) in zip(self.live, key.outputs)
            ),
            key.donated,
            key.device_ids,
            key.options,
            key.checks_indices,
        )

    @property
    def name(self) -> str:
        """The program's name."""
        label = "spmd" if cut_guard is None else cut_guard.label
        return f"{label}_{len(self.nodes)}ops_{len(self.leaves)}in"

    def bounded(self) -> growing_sizes.Bounded | None:
        """The program for many sizes that computes this cut; None if it needs one of its own."""
        if (
            cut_guard is not None
            or not config.bound_growing_sizes
            or config.verify_programs
            or config.check_indices
            or compile_cache.holds(self.key)
        ):
            return None
        return growing_sizes.find(self.key, self.graph)

    def program(self) -> Program:
        """The program, from the cache or newly compiled."""
        return compile_cache.get(self.key, lambda: Program(self.graph(), self.name))


def plan(live: list[Storage], *, donates: bool = True) -> Plan:
    """The program that computes these pending storages; see `_execute` for `donates`."""
    nodes, leaves = collect(live)
    number_of = {leaf: -i - 1 for i, leaf in enumerate(leaves)}
    structure: list[Any] = []
    node_inputs: list[list[int]] = []
    numbers: list[Any] = []
    marks: set[Sharding] = {s.sharding for s in live if s.sharding is not None}
    marks |= {p.sharding for p in {leaf.placement for leaf in leaves} if p.sharding is not None}
    count = 0
    for node in nodes:
        entry = node.entry
        inputs = [number_of[x] if x.parent is None else _number(x, number_of) for x in node.inputs]
        number_of[node] = count
        count += len(entry.outs)
        structure.append(entry)
        structure.extend(inputs)
        node_inputs.append(inputs)
        if node.numbers:
            numbers.extend(node.numbers)
        if entry.sharding is not None:
            marks.add(entry.sharding)
        if entry.border is not None:
            marks.add(entry.border.sharding)
    device_ids = _program_devices(marks, leaves)
    targets = tuple(target_placement(leaf.placement, device_ids) for leaf in leaves)

    out_placements = [_output_placement(s, device_ids) for s in live]
    # What is verified runs twice from the same leaves.
    donated = (
        _donated(live, leaves, targets, out_placements)
        if donates and not config.verify_programs
        else {}
    )
    # jax assigns the donated buffers, in order, to the results of equal shape and dtype, in order.
    # If a buffer went to another result than the one that replaces its value, it would be
    # overwritten while it is still read, and XLA would copy it first.
    order = list(dict.fromkeys([*donated.values(), *range(len(live))]))
    live, out_placements = [live[i] for i in order], [out_placements[i] for i in order]
    out_numbers = [_number(s.value, number_of) for s in live]
    key = compile_cache.Key(
        tuple(structure),
        tuple((leaf.spec.logical, target) for leaf, target in zip(leaves, targets)),
        tuple(zip(out_numbers, (s.spec.logical for s in live), out_placements)),
        tuple(donated),
        device_ids,
        _origins(nodes) if source_lines.is_used() else (),
        tuple(sorted(config.compiler_options.items())),
        config.check_indices,
    )
    return Plan(key, live, nodes, node_inputs, leaves, targets, numbers)


def collect(live: list[Storage]) -> tuple[list[Value], list[Value]]:
    """The pending nodes that the storages need, and the leaves that these read.

    Nodes are in the order of recording, leaves in the order of first use.
    """
    nodes: list[Value] = []
    seen: set[Value] = set()
    stack = [s.value for s in live]
    while stack:
        value = stack.pop()
        if value in seen or value.data is not None:
            continue
        seen.add(value)
        if value.parent is not None:
            stack.append(value.parent)
        else:
            nodes.append(value)
            stack.extend(value.inputs)
    nodes.sort(key=_by_serial)
    leaves = list(dict.fromkeys(x for node in nodes for x in node.inputs if x.data is not None))
    return nodes, leaves


def _origins(nodes: list[Value]) -> tuple[source_lines.Origin | None, ...]:
    origins = tuple(origin_of(node) for node in nodes)
    return origins if any(origins) else ()


def _number(value: Value, number_of: dict[Value, int]) -> int:
    """The value's number, from those of the leaves and nodes (see `program_graph.Node`)."""
    return (
        number_of[value]
        if not isinstance(value, Part) or value.parent is None
        else number_of[value.parent] + value.index
    )


def _program_devices(shardings: set[Sharding], leaves: list[Value]) -> tuple[int, ...]:
    """The devices of a program: those of every mesh in it, else those that its leaves are on."""
    meshes = frozenset(s.mesh for s in shardings)
    if meshes:
        return _union(meshes)
    leaf_devices = {
        device_ids_of(p.jax_sharding)
        for p in {v.placement for v in leaves}
        if p.jax_sharding is not None
    }
    return leaf_devices.pop() if len(leaf_devices) == 1 else default_device_ids()


@lru_cache(maxsize=1024)
def _union(meshes: frozenset[Mesh]) -> tuple[int, ...]:
    """The devices of all meshes: in the order of a mesh that has them all, else ascending."""
    orders = {mesh.ids for mesh in meshes}
    union = {i for ids in orders for i in ids}
    whole = sorted(ids for ids in orders if len(ids) == len(union))
    return whole[0] if whole else tuple(sorted(union))


def _output_placement(storage: Storage, device_ids: tuple[int, ...]) -> Placement | None:
    """Where a program puts the storage's new value; None where the partitioner chooses."""
    if storage.sharding is not None:
        return target_placement(marked_placement(storage.sharding), device_ids)
    before = storage.committed
    if before is not None:
        # An unmarked tensor that is updated in place stays where it is: then the next step needs
        # the same program, and can donate the buffer.
        return (
            target_placement(before.placement, device_ids)
            if before.placement.sharding is None
            else None
        )
    return None


def _donated(
    live: list[Storage],
    leaves: list[Value],
    targets: tuple[Placement, ...],
    out_placements: list[Placement | None],
) -> dict[int, int]:
    """The leaves whose last reader is this program, each with the result that gets its buffer.

    That result is the one that replaces the leaf's value, else another one of the same shape, dtype
    and placement.

    Returns:
        The position of the result by the position of the leaf.
    """
    free = {
        s: (s.spec.shape, s.spec.dtype, placement)
        for s, placement in zip(live, out_placements)
        if placement is not None
    }
    number = {s: i for i, s in enumerate(live)}
    donated: dict[int, int] = {}
    others: list[tuple[int, Any]] = []
    for position, (leaf, target) in enumerate(zip(leaves, targets)):
        owner = leaf.owner() if leaf.owner is not None else None
        if owner is not None and owner.value is leaf:
            continue
        layout = (leaf.spec.shape, leaf.spec.dtype, target)
        if owner is not None and free.get(owner) == layout:
            donated[position] = number[owner]
            del free[owner]
        else:
            others.append((position, layout))
    if others and free:
        by_layout: dict[Any, list[int]] = {}
        for s, layout in free.items():
            by_layout.setdefault(layout, []).append(number[s])
        for position, layout in others:
            if by_layout.get(layout):
                donated[position] = by_layout[layout].pop(0)
    return dict(sorted(donated.items()))


def materialize(storage: Storage) -> Value:
    """The storage's value as a leaf; cuts if it is pending."""
    with lock:
        if storage.value.data is None:
            storage.request()
            cut(wanted=storage)
        return storage.value


def to_host(storage: Storage) -> torch.Tensor:
    """The storage's values, without padding, as a new CPU tensor.

    Cuts if they are pending, and waits for the device.

    Raises:
        IndexRangeError: a program under `config.check_indices` found an index outside its dim.
    """
    value = materialize(storage)
    if value.placement.jax_sharding is None:
        return value.data.clone()
    refuse_local(value)
    host = buffers.download(value.data, value.spec.shape)
    index_checks.raise_if_found()
    return host


def upload(storage: Storage) -> None:
    """Starts the transfer of data that is still on the host; does nothing for other data.

    Other threads may record meanwhile.
    """
    value = storage.value
    if value.data is None or value.placement.jax_sharding is not None:
        return
    host, placement = value.data, value.placement
    target = device_placement(placement.sharding)
    array = buffers.upload(host, target.device_sharding, padded_shape(value.spec, target.sharding))
    with lock:
        # In the meantime, the value may have been marked again, or uploaded by a program.
        if value.placement is placement:
            value.data, value.placement = array, target


def place(storage: Storage) -> jax.Array:
    """The storage's device array; starts the upload if the data is still on the host."""
    value = materialize(storage)
    if value.placement.jax_sharding is None:
        with lock:
            convert(value, device_placement(value.placement.sharding))
    refuse_local(value)
    if value.placement.room is not None:
        with lock:
            move(value, value.placement.with_room(None))
    return value.data


@contextmanager
def verify() -> Iterator[None]:
    """Inside the block, every program over several devices is compared with itself on one device.

    A difference beyond rounding raises `VerificationError`, which names the first operation that
    differs, its layouts and its line. The tensors stay pending, as after any program that failed.
    Indices are checked, too (`config.check_indices`). What is pending at the end of the block is
    computed. For a program that is suspected to be wrong, and for tests: it takes the memory of all
    tensors on one device, a second compilation, and waits for each program. A program with a manual
    region is left out, with a warning.

    Example:
        >>> import torch, spmd_core as spmd
        >>> with spmd.verify():
        ...     total = torch.ones(3, device="xla").sum().item()
        >>> total
        3.0
    """
    names = ("verify_programs", "check_indices", "record_source_lines")
    before = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, True)
    try:
        yield
        cut(wait=True)
    finally:
        for name, value in before.items():
            setattr(config, name, value)
