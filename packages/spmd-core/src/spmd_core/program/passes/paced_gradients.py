"""Has a TPU's program make gradients, and casts of parameters, where they were recorded.

XLA's TPU compiler orders operations by what they free and take at their place, and sees no further:

- The gradient of a parameter is read at the end of the program, where all are clipped by their
  norm. The compiler makes it there, if it is no smaller than its operands, and keeps these until
  then, or each device's part of a gradient in place of the reduced shard.
- A checkpointed block casts its parameters in both runs. The compiler casts once, in the first one,
  and keeps the casts of the whole model until backward.

With GPT-2 over 4 devices, that was half of the temporaries. So in the second run of a block, which
begins with an optimization barrier, the barrier waits for all gradients but the later half of those
that the last block made (which may be reduced meanwhile), and parameters are cast behind it. What
reads a gradient waits for all that no second run has waited for: the compiler makes an all-reduce
of some reduce-scatters, and would cut it where it is read, at the end.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from spmd_core import dtypes
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Parts
from spmd_core.program.ir import Graph, Op, Ref, Rewriter, inserted
from spmd_core.program.mark_names import MARK, MARK_AT_ONCE
from spmd_core.program.partial_sums import PartialSumEntry, Sum
from spmd_core.program.target import Target


def paced_gradients(graph: Graph, target: Target) -> Graph:
    """The graph with such barriers, for a TPU."""
    if target.platform != "tpu":
        return graph
    pace = _Pace(graph, is_summed=len(target.device_ids) > 1)
    for op in graph.ops:
        pace.add(op)
    return pace.rewriter.graph()


@dataclass
class _Pace:
    """What barriers wait for, while the graph is walked.

    Attributes:
        graph: the graph; what a barrier has waited for is read behind it.
        is_summed: whether gradients are summed over devices.
        rewriter: makes the new graph.
    """

    graph: Graph
    is_summed: bool
    rewriter: Rewriter = field(init=False)
    _made: list[Ref] = field(default_factory=list)  # gradients
    _late: list[Ref] = field(default_factory=list)  # earlier ones, for which no barrier has waited
    _parts: list[Ref] = field(default_factory=list)  # partial sums that nothing has read yet
    _waited: set[Ref] = field(default_factory=set)  # of these
    _casts: set[tuple[Ref, object]] = field(default_factory=set)  # of inputs of the program
    _copied: dict[Ref, Ref] = field(default_factory=dict)  # of casts and marks: what they copy
    _start: Ref | None = None  # what the current second run waits for
    # The first result of the recorded operation at hand, with its position, and the operands of
    # partial sums that were made of the operation, behind that result.
    _first: tuple[int, Ref] | None = None
    _behind: dict[Ref, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.graph)

    def add(self, op: Op) -> None:
        """Adds an operation, whose operands are behind a barrier where they have to wait."""
        operands = self._operands(op) if op.manual is None else None
        self.rewriter.keep(op, operands)
        name = op.entry.name
        if name in (MARK, MARK_AT_ONCE):
            self._made.append(Ref(op))
        if (op.is_cast or name in (MARK, MARK_AT_ONCE)) and op.operands[0].op is not None:
            self._copied[Ref(op)] = op.operands[0]
        self._parts = [x for x in self._parts if x not in op.operands]
        if op.is_inserted and not isinstance(op.entry, PartialSumEntry):
            return
        if self._first is None or self._first[0] != op.source.position:
            self._first, self._behind = (op.source.position, Ref(op)), {}
        if isinstance(op.entry, PartialSumEntry):
            self._parts.append(Ref(op))

    def _operands(self, op: Op) -> Sequence[Ref] | None:
        name, operands = op.entry.name, [self.rewriter.now(x) for x in op.operands]
        if name == BARRIER and not op.is_inserted and len(operands) == 2:
            operands = self._after_gradients(op, operands)
            self._start = operands[1]
            return operands
        if op.is_cast and op.operands[0].op is None:
            cast = (op.operands[0], op.entry)
            is_again = cast in self._casts
            self._casts.add(cast)
            if is_again and self._start is not None:
                return self.rewriter.wait([operands[0], self._start], op.source)[:1]
        elif not {*self._made, *self._late}.isdisjoint(op.operands):
            numbers = [*self._late, *self._made]
            self._made, self._late = [], []
            self._read_behind(numbers, self._wait([], numbers, op), op)
            return None
        elif isinstance(op.entry, PartialSumEntry):
            return self._after_input_gradient(op, op.entry.part, operands)
        return None

    def _after_input_gradient(
        self, op: Op, part: Sum, operands: Sequence[Ref]
    ) -> Sequence[Ref] | None:
        """The operands for the gradient of a weight, which waits for the input's gradient.

        The weight, which was gathered for the latter, is then gone.
        """
        entry, structure = part.op.entry, part.op.entry.structure
        if entry.traits.parts is not Parts.PIECES or not structure or structure[0] is None:
            return None
        if self._first is None or self._first[0] != op.source.position or part.result == 0:
            return None
        if not self._behind:
            first = self.rewriter.now(self._first[1])
            behind = self.rewriter.wait([*operands, first], op.source)
            self._behind = dict(zip(operands, behind))
        return [self._behind[x] for x in operands]

    def _after_gradients(self, op: Op, operands: Sequence[Ref]) -> list[Ref]:
        # Parts of a gradient that adds up several, such as that of a table which is read twice.
        parts = [x for x in self._parts if x not in self._waited]
        half = len(self._made) // 2
        gradients = [*self._late, *self._made[:half]]
        self._made, self._late = [], self._made[half:]
        if not gradients and not parts:
            return [*operands]
        found = self._wait([*operands, *map(self.rewriter.now, parts)], gradients, op)
        num_first = len(operands) + len(parts)
        for part, behind in zip(parts, found[len(operands) : num_first]):
            self.rewriter.replace(part, behind)
        self._waited.update(parts)
        self._read_behind(gradients, found[num_first:], op)
        return [*found[: len(operands)]]

    def _wait(self, values: Sequence[Ref], gradients: Sequence[Ref], op: Op) -> tuple[Ref, ...]:
        """Values behind a barrier, and for each gradient the array that is materialised."""
        stored = [self.rewriter.now(self._source(x)) for x in gradients]
        return self.rewriter.wait([*values, *stored], op.source)

    def _source(self, gradient: Ref) -> Ref:
        """What a gradient is a wider copy of, such as one that autocast computed; or itself.

        A gradient that devices sum is summed in the dtype of the copy.
        """
        source = gradient
        while not self.is_summed and source in self._copied:
            inner = self._copied[source]
            if inner.spec.dtype.itemsize > source.spec.dtype.itemsize:
                break
            source = inner
        return source

    def _read_behind(self, gradients: Sequence[Ref], stored: Sequence[Ref], op: Op) -> None:
        """Has all further operations read gradients from what came out of a barrier."""
        for gradient, behind in zip(gradients, stored):
            dtype = gradient.spec.dtype
            if behind.spec.dtype != dtype:
                wide = dtypes.to_jax(dtype)
                entry = inserted("spmd::cast", functools.partial(_cast, wide), gradient.spec)
                behind = Ref(
                    self.rewriter.add(entry, [behind], op.source, manuals=(gradient.manual,))
                )
            self.rewriter.replace(gradient, behind)


def _cast(dtype: np.dtype, inputs: list[jax.Array]) -> jax.Array:
    return inputs[0].astype(dtype)
