"""The intermediate representation that passes rewrite: a list of operations in lowering order.

It is made from a recorded graph (`program_graph`), whose operations refer to values by number. Here
an operation refers to its operands as objects, so that a pass can insert, move and drop operations.
Operations are immutable: a pass walks over a graph with a `Rewriter` and makes another graph, which
shares unchanged operations with the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from spmd_core.errors import ProgramError
from spmd_core.graph.placement import Placement
from spmd_core.graph.subgraphs import Subgraph
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import SAME, Elements
from spmd_core.program import program_graph, regions
from spmd_core.program.index_flag import Flag
from spmd_core.program.mark_names import MARK_ALONG, MARK_SHARDING
from spmd_core.runtime.jax_sharding import replicated
from spmd_core.sharding.sharding import Manual, Sharding
from spmd_core.source_lines import Origin


class Source(NamedTuple):
    """The recorded operation from which an operation stems.

    Attributes:
        name: the recorded operation's name, such as `aten::mm`.
        position: its position among the recorded operations.
        origin: the user's source line; None if it was not recorded.
    """

    name: str
    position: int
    origin: Origin | None = None


# The position of a scalar input among those of the program; for stacks, one for each row.
Position = int | tuple[int, ...]


class Input:
    """An input of the program.

    Attributes:
        leaf: the spec and placement.
        number: the position among the inputs.
    """

    __slots__ = ("leaf", "number")

    def __init__(self, leaf: program_graph.Leaf, number: int) -> None:
        self.leaf, self.number = leaf, number


class Op:
    """One operation.

    Attributes:
        entry: what it computes.
        operands: the values that it reads.
        scalars: the positions of its scalar inputs among those of the program.
        source: the recorded operation from which it stems, and after which it is named in the
            lowered program.
        manuals: for each result, the manual region that it is local to, or None.
        hint: a layout for its kernel, if a pass found one.
        bodies: the subgraphs that it runs, as graphs. The layouts of their inputs are not known,
            and their scalar inputs are counted from 0 in each of them.
    """

    __slots__ = ("bodies", "entry", "hint", "manuals", "operands", "scalars", "source")

    def __init__(
        self,
        entry: Entry,
        operands: Sequence["Ref"],
        source: Source,
        *,
        scalars: tuple[Position, ...] = (),
        manuals: tuple[Manual | None, ...] | None = None,
        hint: registry.Hint | None = None,
        bodies: "tuple[Graph, ...]" = (),
    ) -> None:
        self.entry, self.operands, self.source = entry, tuple(operands), source
        self.scalars, self.hint, self.bodies = scalars, hint, bodies
        if manuals is None:
            manual = regions.manual_of(entry.name, entry.border, [x.manual for x in operands])
            manuals = (manual,) * len(entry.outs)
        self.manuals = manuals

    @property
    def manual(self) -> Manual | None:
        """The region that the first result is local to; None if it is global."""
        return self.manuals[0]

    @property
    def results(self) -> tuple["Ref", ...]:
        """All results."""
        return tuple(Ref(self, i) for i in range(len(self.entry.outs)))

    def source_of_elements(self, most: Elements) -> "Ref | None":
        """The operand from which the results take their elements, maybe converted to another dtype.

        None if the results take them in a weaker sense than `most` (see `Elements`).
        """
        traits = self.entry.traits
        return self.operands[traits.source] if traits.elements <= most else None

    @property
    def is_cast(self) -> bool:
        """Whether it converts a value to another dtype, and does nothing else."""
        source = self.source_of_elements(Elements.SAME)
        return source is not None and source.spec.dtype != self.entry.spec.dtype

    @property
    def is_inserted(self) -> bool:
        """Whether a pass inserted it, as an `InsertedEntry`."""
        return isinstance(self.entry, InsertedEntry)


class Ref(NamedTuple):
    """A value: a result of an operation, or an input of the program."""

    producer: Op | Input
    result: int = 0

    @property
    def op(self) -> Op | None:
        """The operation that computes it; None for an input."""
        return self.producer if isinstance(self.producer, Op) else None

    @property
    def spec(self) -> Spec:
        if isinstance(self.producer, Op):
            return self.producer.entry.outs[self.result]
        return self.producer.leaf.spec

    @property
    def manual(self) -> Manual | None:
        """The manual region that it is local to, or None."""
        if isinstance(self.producer, Op):
            return self.producer.manuals[self.result]
        return self.producer.leaf.placement.manual


class InsertedEntry(Entry):
    """An operation that only passes insert.

    Its kernel is lowered without the rules for the partitioner. It takes a value that is local to a
    manual region as one array with an additional first dim for the devices.
    """

    __slots__ = ()


class BarrierEntry(InsertedEntry):
    """A barrier: its results are its operands; a reader of one result waits for all operands."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Graph:
    """A program while it is lowered.

    Attributes:
        recorded: the recorded graph, with the placements of its results.
        inputs: the program's inputs.
        ops: the operations; each comes after those whose results it reads.
        outputs: the values that the program returns.
        flag: the program's index checks; None without any.
        checked: the results of the operations that check indices.
    """

    recorded: program_graph.RecordedGraph
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Ref, ...]
    flag: Flag | None = None
    checked: tuple[Ref, ...] = ()

    @staticmethod
    def of(recorded: program_graph.RecordedGraph) -> "Graph":
        """The graph of a recorded graph, before any pass.

        Raises:
            ProgramError: an operation takes tensors of different manual regions, or a region's mesh
                does not have the program's devices.
        """
        inputs = tuple(Input(leaf, i) for i, leaf in enumerate(recorded.leaves))
        values: list[Ref] = []
        ops: list[Op] = []
        num_scalars = 0

        def value(number: int) -> Ref:
            return values[number] if number >= 0 else Ref(inputs[-number - 1])

        for position, node in enumerate(recorded.nodes):
            entry = node.entry
            scalars = tuple(range(num_scalars, num_scalars + len(entry.number_kinds)))
            num_scalars += len(scalars)
            source = Source(entry.name, position, node.origin)
            bodies = tuple(Graph.of(_body(x, recorded)) for x in entry.subgraphs)
            operands = [value(n) for n in node.inputs]
            op = Op(entry, operands, source, scalars=scalars, bodies=bodies)
            if bodies and op.manual is not None:
                raise ProgramError(
                    "loops and branches take whole tensors; "
                    f"{entry.name} got a tensor local to a manual region. "
                    "Call shard_map inside of the loop's function."
                )
            region = op.manual if entry.border is None else entry.border.manual
            if region is not None:
                regions.check_devices(region, recorded.device_ids)
            ops.append(op)
            values.extend(op.results)
        outputs = tuple(value(output.value) for output in recorded.outputs)
        return Graph(recorded, inputs, tuple(ops), outputs)

    @property
    def device_ids(self) -> tuple[int, ...]:
        return self.recorded.device_ids

    @property
    def out_placements(self) -> tuple[Placement | None, ...]:
        """The placements of the results; None for those that the partitioner chooses."""
        return tuple(
            output.placement if value.manual is None else regions.placement(value.manual)
            for output, value in zip(self.recorded.outputs, self.outputs)
        )

    def all_ops(self) -> Iterator[Op]:
        """The operations, and those of the bodies that some of them run."""
        for op in self.ops:
            yield op
            for body in op.bodies:
                yield from body.all_ops()

    def users(self) -> dict[Ref, list[Op]]:
        """The readers of each value; an operation that reads it twice is listed twice."""
        found: dict[Ref, list[Op]] = {}
        for op in self.ops:
            for operand in op.operands:
                found.setdefault(operand, []).append(op)
        return found

    def with_hints(self, hints: Mapping[Op, registry.Hint]) -> "Graph":
        """The graph with these hints on its operations; itself if there are none."""
        if not hints:
            return self
        rewriter = Rewriter(self)
        for op in self.ops:
            rewriter.keep(op, hint=hints.get(op))
        return rewriter.graph()

    def check(self) -> None:
        """Asserts the invariants that hold after every pass."""
        known: set[Ref] = {Ref(x) for x in self.inputs}
        for op in self.ops:
            name = f"{op.entry.name} (of operation {op.source.position}, {op.source.name})"
            assert known.issuperset(op.operands), f"{name} reads a value that is computed after it"
            assert len(op.scalars) == len(op.entry.number_kinds), f"{name} lacks scalar inputs"
            assert len(op.manuals) == len(op.entry.outs), f"{name} has other results"
            if op.entry.sharding is not None:
                assert len(op.operands) == 1, f"{name} marks one value"
                assert op.operands[0].spec.shape == op.entry.spec.shape, f"{name} changes a shape"
            if isinstance(op.entry, BarrierEntry):
                specs = tuple(x.spec.logical for x in op.operands)
                assert specs == tuple(x.logical for x in op.entry.outs), f"{name} changes a spec"
                assert op.manuals == tuple(x.manual for x in op.operands), f"{name} moves a value"
            for body in op.bodies:
                body.check()
            known.update(op.results)
        assert known.issuperset(self.outputs), "a result is not computed"
        assert known.issuperset(self.checked), "a check is not computed"
        for output, value in zip(self.recorded.outputs, self.outputs, strict=True):
            same = (output.spec.shape, output.spec.dtype) == (value.spec.shape, value.spec.dtype)
            assert same, f"a result of {output.spec!r} is computed as {value.spec!r}"

    def text(self) -> str:
        """One line for each operation: operands, results, mark or hint, and source line."""
        return "\n".join(_lines(self)) + "\n"


@dataclass
class Rewriter:
    """Makes a graph from another one in a walk over its operations.

    Each operation of the old graph is kept or left out, in order, and new ones are added between
    them. A later operation that reads an old value reads its current replacement.
    """

    old: Graph
    ops: list[Op] = field(default_factory=list)
    checked: list[Ref] = field(default_factory=list)
    _now: dict[Ref, Ref] = field(default_factory=dict)

    def now(self, value: Ref) -> Ref:
        """The current replacement of a value of the old graph."""
        return self._now.get(value, value)

    def replace(self, value: Ref, by: Ref) -> None:
        """From here on, readers of a value of the old graph read another value."""
        self._now[value] = by

    def add(
        self,
        entry: Entry,
        operands: Sequence[Ref],
        source: Source,
        *,
        manuals: tuple[Manual | None, ...] | None = None,
        scalars: tuple[Position, ...] = (),
    ) -> Op:
        """Adds a new operation, which reads values of the new graph."""
        op = Op(entry, operands, source, manuals=manuals, scalars=scalars)
        self.ops.append(op)
        return op

    def keep(
        self,
        op: Op,
        operands: Sequence[Ref] | None = None,
        *,
        hint: registry.Hint | None = None,
        bodies: tuple[Graph, ...] | None = None,
    ) -> Op:
        """Adds an operation of the old graph; its results replace the old ones.

        Args:
            op: the operation.
            operands: values of the new graph; by default the replacements of its operands.
            hint: a layout for its kernel; by default its own hint.
            bodies: the subgraphs that it runs; by default its own.
        """
        given = tuple(map(self.now, op.operands)) if operands is None else tuple(operands)
        kept = op
        if given != op.operands or hint is not None or bodies is not None:
            kept = Op(
                op.entry,
                given,
                op.source,
                scalars=op.scalars,
                manuals=op.manuals,
                hint=hint or op.hint,
                bodies=op.bodies if bodies is None else bodies,
            )
            for old, new in zip(op.results, kept.results):
                self._now[old] = new
        self.ops.append(kept)
        return kept

    def wait(self, values: Sequence[Ref], source: Source) -> tuple[Ref, ...]:
        """Adds a barrier for values of the new graph, and returns its results."""
        specs = tuple(value.spec for value in values)
        entry = BarrierEntry(BARRIER, _barrier, specs)
        manuals = tuple(value.manual for value in values)
        return self.add(entry, values, source, manuals=manuals).results

    def graph(self) -> Graph:
        """The new graph, without operations whose results are not read."""
        outputs = tuple(map(self.now, self.old.outputs))
        checked = (*map(self.now, self.old.checked), *self.checked)
        read: set[Op | Input] = {value.producer for value in (*outputs, *checked)}
        live = []
        for op in reversed(self.ops):
            if op in read:
                live.append(op)
                read.update(value.producer for value in op.operands)
        return replace(self.old, ops=tuple(reversed(live)), outputs=outputs, checked=checked)


def _body(subgraph: Subgraph, recorded: program_graph.RecordedGraph) -> program_graph.RecordedGraph:
    """What an operation of a recorded graph runs, as a graph of the same program."""
    unknown = Placement.of(replicated(recorded.device_ids), None)
    specs = [*subgraph.parameters, *(spec for entry, _ in subgraph.nodes for spec in entry.outs)]
    count = len(subgraph.parameters)

    def spec(number: int) -> Spec:
        return specs[count + number if number >= 0 else -number - 1]

    origins = subgraph.origins or (None,) * len(subgraph.nodes)
    return program_graph.RecordedGraph(
        tuple(program_graph.Leaf(x, unknown) for x in subgraph.parameters),
        tuple(program_graph.Node(*node, origin) for node, origin in zip(subgraph.nodes, origins)),
        tuple(program_graph.Output(number, spec(number), None) for number in subgraph.outputs),
        (),
        recorded.device_ids,
        recorded.options,
        recorded.checks_indices,
    )


def _barrier(context: registry.Context, inputs: list[jax.Array], numbers: Any) -> list[jax.Array]:
    return list(jax.lax.optimization_barrier(tuple(inputs)))


def _unchanged(context: registry.Context, inputs: Any, numbers: Any) -> Any:
    return inputs


def mark(spec: Spec, sharding: Sharding, along: tuple[int, ...] | None) -> Entry:
    """A mark that a pass inserts; for the arguments see `Entry`."""
    name = MARK_SHARDING if along is None else MARK_ALONG
    return Entry(name, _unchanged, (spec,), sharding=sharding, along=along, traits=SAME)


def inserted(
    name: str, function: Callable[[list[jax.Array]], jax.Array], spec: Spec
) -> InsertedEntry:
    """An operation that a pass inserts, with one result."""
    return InsertedEntry(name, lambda context, inputs, numbers: [function(inputs)], (spec,))


def before_barriers(value: Ref) -> Ref:
    """A value; for the result of a barrier that a pass inserted, the barrier's operand."""
    while isinstance(value.producer, Op) and isinstance(value.producer.entry, BarrierEntry):
        value = value.producer.operands[value.result]
    return value


# The text of a graph.


def _lines(graph: Graph) -> Iterator[str]:
    names: dict[Ref, str] = {}
    for x in graph.inputs:
        names[Ref(x)] = f"input {x.number}"
        sharding = x.leaf.placement.sharding
        where = "" if sharding is None else f" {_dims(sharding)}"
        region = "" if x.leaf.placement.manual is None else " local"
        yield f"input {x.number}: {x.leaf.spec!r}{where}{region}"
    for op in graph.ops:
        for result in op.results:
            names[result] = f"%{len(names) - len(graph.inputs)}"
        results = ", ".join(names[x] for x in op.results)
        operands = ", ".join(names[x] for x in op.operands)
        specs = ", ".join(map(repr, op.entry.outs))
        yield f"{results} = {op.entry.name}({operands}) -> {specs}{_remarks(op)}"
        for body in op.bodies:
            yield from (f"    {line}" for line in _lines(body))
    yield f"return {', '.join(names[x] for x in graph.outputs)}"


def _remarks(op: Op) -> str:
    entry, found = op.entry, ""
    if entry.sharding is not None:
        found += f" {_dims(entry.sharding, entry.along)}"
    if entry.border is not None:
        found += f" {_dims(entry.border.sharding)}"
    if any(op.manuals):
        found += " local"
    if op.scalars:
        found += f" scalars {', '.join(map(_position, op.scalars))}"
    if op.hint is not None:
        found += f" {op.hint}"
    if op.source.name != entry.name:
        found += f" of {op.source.name}"
    return found if op.source.origin is None else f"{found}  # {op.source.origin}"


def _position(position: Position) -> str:
    if isinstance(position, int) or len(position) <= 3:
        return str(position)
    return f"({position[0]}, {position[1]}, ..., {position[-1]})"


def _dims(sharding: Sharding, along: tuple[int, ...] | None = None) -> str:
    """A sharding as its partition spec, such as `P(fsdp, None)`."""
    names = sharding.mesh.axis_names or range(len(sharding.mesh.mesh_shape))
    dims = ["+".join(str(names[axis]) for axis in axes) or "None" for axes in sharding.dims]
    only = "" if along is None else f" along {', '.join(str(names[axis]) for axis in along)}"
    return f"P({', '.join(dims)}){only}"
