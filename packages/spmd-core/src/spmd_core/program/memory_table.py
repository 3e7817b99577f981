"""A table of the largest tensors of a program, with names and shardings, for out-of-memory errors.

It only uses facts that are known before partitioning, so that it also serves a program that the
compiler refuses: the shardings of arguments, marked values and results. For other values it says
that the compiler chooses the sharding.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding

from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Spec
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.program_graph import Node, RecordedGraph, stored_shape
from spmd_core.runtime.jax_sharding import jax_mesh, named_sharding, replicated
from spmd_core.sharding.mesh import get_global_mesh
from spmd_core.source_lines import Origin

_NUM_ROWS = 8
_LEAST = 1e-3  # as a fraction of the largest tensor: smaller ones are left out


@dataclass(frozen=True)
class _Row:
    """One tensor of a program.

    Attributes:
        num_bytes: bytes on each device; an equal share, if the compiler chooses the sharding.
        what: the tensor's name, or the operation that computes it, and its spec.
        layout: how it is split.
        split: the bytes that it would take if another mesh axis split it; empty if none can.
        where: the user's source line; empty if it was not recorded.
    """

    num_bytes: int
    what: str
    layout: str
    split: str
    where: str


def text(graph: RecordedGraph, names: Mapping[Storage, str]) -> str:
    """The largest tensors, two or three lines each.

    Args:
        graph: the program's graph.
        names: the names of tensors, by storage (`tensor_names.names`).
    """
    counts = Counter(_Table(graph, names).rows())
    chosen = sorted(counts.items(), key=lambda item: -item[0].num_bytes * item[1])[:_NUM_ROWS]
    chosen = [(row, n) for row, n in chosen if row.num_bytes * n >= _LEAST * chosen[0][0].num_bytes]
    lines = ["Its largest tensors, with the bytes on each device:"]
    for row, count in chosen:
        times = "" if count == 1 else f"{count} x "
        lines.append(f"{_size(row.num_bytes):>14}  {times}{row.what}")
        lines.append(f"{'':16}{row.layout}{row.split}")
        if row.where:
            lines.append(f"{'':16}{row.where}")
    if not any(row.where for row, _ in chosen):
        lines.append(
            "spmd.config.record_source_lines = True before they are recorded adds their lines."
        )
    return "\n".join(lines)


class _Table:
    def __init__(self, graph: RecordedGraph, names: Mapping[Storage, str]) -> None:
        self._graph, self._names = graph, names
        self._marks: dict[int, NamedSharding] = {}
        for node in graph.nodes:
            if node.entry.sharding is not None:
                named = named_sharding(node.entry.sharding, graph.device_ids)
                self._marks.setdefault(node.inputs[0], named)
        placed = [*self._marks.values(), *(p.jax_sharding for p in self._placements())]
        self._is_split = any(s is not None and not s.is_fully_replicated for s in placed)
        self._mesh = self._find_mesh()

    def _placements(self) -> list[Placement]:
        """The placements of the arguments, and of results as far as they are known."""
        outputs = (output.placement for output in self._graph.outputs)
        return [leaf.placement for leaf in self._graph.leaves] + [p for p in outputs if p]

    def _find_mesh(self) -> Mesh | None:
        """The user's mesh: that of a mark, or the global mesh."""
        marks = [p.sharding for p in self._placements()]
        marks += [node.entry.sharding for node in self._graph.nodes]
        mesh = next((mark.mesh for mark in marks if mark is not None), get_global_mesh())
        has_all = mesh is not None and mesh.size() == len(self._graph.device_ids)
        return jax_mesh(mesh) if mesh is not None and has_all else None

    def rows(self) -> Iterator[_Row]:
        graph = self._graph
        argument_names = set()
        for leaf in graph.leaves:
            name = self._name(leaf.owner)
            argument_names.add(name)
            shape = stored_shape(leaf.spec, leaf.placement)
            what = f"{name or 'an argument'}, {leaf.spec!r}"
            named = leaf.placement.jax_sharding
            yield self._row(what, leaf.spec, shape, named, _place("made", leaf.origin))
        outputs = {output.value: output for output in graph.outputs}
        value = 0
        for node in graph.nodes:
            entry = node.entry
            for spec in entry.outs:
                output = outputs.get(value)
                named, shape = self._marks.get(value), spec.shape
                name = "" if output is None else self._name(output.owner)
                if output is not None and output.placement is not None:
                    named = output.placement.jax_sharding
                    shape = stored_shape(output.spec, output.placement)
                has_array = _has_arrays(node, is_result=output is not None)
                # An argument that is updated in place is listed once, as its buffer is donated.
                if (has_array or name) and not (name and name in argument_names):
                    made = f"{entry.name} {spec!r}"
                    what = f"{name}, {spec!r} by {entry.name}" if name else made
                    yield self._row(what, spec, shape, named, _place("recorded", node.origin))
                value += 1

    def _name(self, owner: "object") -> str:
        storage = owner() if callable(owner) else None
        return self._names.get(storage, "") if isinstance(storage, Storage) else ""

    def _row(
        self,
        what: str,
        spec: Spec,
        shape: tuple[int, ...],
        named: NamedSharding | None,
        where: str,
    ) -> _Row:
        num_devices = len(self._graph.device_ids)
        size = spec.dtype.itemsize
        if num_devices == 1:
            return _Row(math.prod(shape) * size, what, "on the only device", "", where)
        if named is None and not self._is_split:
            named = replicated(self._graph.device_ids)
        if named is None:
            layout = f"split as the compiler chooses: an equal share of {num_devices}; "
            layout += f"the whole takes {_size(spec.num_bytes)}"
            return _Row(-(-spec.num_bytes // num_devices), what, layout, "", where)
        num_bytes = math.prod(named.shard_shape(shape)) * size
        if named.is_fully_replicated:
            layout = f"replicated on all {num_devices} devices"
        else:
            axes = ", ".join(f"{axis}={n}" for axis, n in named.mesh.shape.items())
            layout = f"split {tuple(named.spec)} over {axes}"
        return _Row(num_bytes, what, layout, self._split_further(named, shape, num_bytes), where)

    def _split_further(self, named: NamedSharding, shape: tuple[int, ...], num_bytes: int) -> str:
        """The bytes that the tensor would take if another axis of the mesh split it."""
        mesh = named.mesh if not named.is_fully_replicated else self._mesh
        used: set[str] = set()
        for axes in named.spec:
            used |= {axes} if isinstance(axes, str) else {*(axes or ())}
        sizes = {"all devices": len(self._graph.device_ids)} if mesh is None else dict(mesh.shape)
        block = named.shard_shape(shape)
        found = []
        for axis, n in sizes.items():
            if axis not in used and n > 1 and max(block, default=1) >= n:
                # Split the dim that gives the smallest shards: one that n divides, if there is one.
                share = min(-(-m // n) * (math.prod(block) // m) for m in block if m >= n)
                each = share * num_bytes // math.prod(block)
                found.append(f"over {axis}{f'={n}' if mesh else ''} {_size(each)}")
        return f"; if split {', '.join(found)}" if found else ""


def _has_arrays(node: Node, *, is_result: bool) -> bool:
    """Whether its result is materialised: views and casts are fused into their readers."""
    entry = node.entry
    is_constant = not node.inputs and not entry.random and not is_result
    is_passed_on = entry.name == BARRIER or entry.border is not None
    return entry.traits.elements > Elements.BLOCK and not (is_constant or is_passed_on)


def _place(verb: str, origin: Origin | None) -> str:
    """The user's source line, and the module that ran; empty if it was not recorded."""
    if origin is None:
        return ""
    return f"{verb} at {origin}" + (f", in {origin.module}" if origin.module else "")


def _size(num_bytes: int) -> str:
    is_large = num_bytes >= 1e9
    return f"{num_bytes / 1e9:,.2f} GB" if is_large else f"{num_bytes / 1e6:,.1f} MB"
