"""Has a TPU compute gradients, and casts of parameters, where they were recorded.

XLA's TPU scheduler orders operations by the memory that they free and allocate, with no lookahead:

- The gradient of a parameter is read at the end of the program, where all are clipped by their
  norm. If it is no smaller than its operands, the scheduler computes it there, and keeps the
  operands until then, or keeps each device's partial sum in place of the reduced shard.
- A checkpointed block casts its parameters in the forward and in the recomputation. XLA merges the
  two casts into one, in the forward, and keeps the casts of all parameters until backward.

With GPT-2 over 4 devices, that was half of the temporaries. The recomputation of a block begins
with an optimization barrier. So this pass has that barrier wait for all gradients but the later
half of those of the previous block (which may be reduced meanwhile), and has parameters cast after
it. An operation that reads a gradient waits for all gradients for which no barrier has waited: XLA
turns some reduce-scatters into an all-reduce and a slice, and would slice only at the end.
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
    """The walk over the graph, and the values that barriers have to wait for.

    Attributes:
        graph: the graph. A value that a barrier has waited for is read from the barrier's result.
        is_summed: whether gradients are summed over devices.
        rewriter: makes the new graph.
    """

    graph: Graph
    is_summed: bool
    rewriter: Rewriter = field(init=False)
    _made: list[Ref] = field(default_factory=list)  # gradients
    _late: list[Ref] = field(default_factory=list)  # earlier gradients that no barrier waited for
    _parts: list[Ref] = field(default_factory=list)  # partial sums that nothing has read yet
    _waited: set[Ref] = field(default_factory=set)  # partial sums that a barrier waited for
    _casts: set[tuple[Ref, object]] = field(default_factory=set)  # of inputs of the program
    _copied: dict[Ref, Ref] = field(default_factory=dict)  # operand of each cast and mark
    _start: Ref | None = None  # the barrier's result at the start of the current recomputation
    # The first result of the current recorded operation, with its position. Then, after a barrier
    # for that result, the operands of the partial sums that were made of the operation.
    _first: tuple[int, Ref] | None = None
    _after_first: dict[Ref, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.graph)

    def add(self, op: Op) -> None:
        """Adds an operation, which reads its operands from a barrier if it has to wait."""
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
            self._first, self._after_first = (op.source.position, Ref(op)), {}
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
            gradients = [*self._late, *self._made]
            self._made, self._late = [], []
            self._read_after(gradients, self._wait([], gradients, op), op)
            return None
        elif isinstance(op.entry, PartialSumEntry):
            return self._after_input_gradient(op, op.entry.part, operands)
        return None

    def _after_input_gradient(
        self, op: Op, part: Sum, operands: Sequence[Ref]
    ) -> Sequence[Ref] | None:
        """The operands of a weight's gradient, after a barrier for the input's gradient.

        The weight was gathered for the input's gradient, and is freed before this one is computed.
        """
        entry, structure = part.op.entry, part.op.entry.structure
        if entry.traits.parts is not Parts.CHUNKS or not structure or structure[0] is None:
            return None
        if self._first is None or self._first[0] != op.source.position or part.result == 0:
            return None
        if not self._after_first:
            first = self.rewriter.now(self._first[1])
            results = self.rewriter.wait([*operands, first], op.source)
            self._after_first = dict(zip(operands, results))
        return [self._after_first[x] for x in operands]

    def _after_gradients(self, op: Op, operands: Sequence[Ref]) -> list[Ref]:
        # Partial sums that are still to be added up, as for a table that is read twice.
        parts = [x for x in self._parts if x not in self._waited]
        half = len(self._made) // 2
        gradients = [*self._late, *self._made[:half]]
        self._made, self._late = [], self._made[half:]
        if not gradients and not parts:
            return [*operands]
        found = self._wait([*operands, *map(self.rewriter.now, parts)], gradients, op)
        num_first = len(operands) + len(parts)
        for part, result in zip(parts, found[len(operands) : num_first]):
            self.rewriter.replace(part, result)
        self._waited.update(parts)
        self._read_after(gradients, found[num_first:], op)
        return [*found[: len(operands)]]

    def _wait(self, values: Sequence[Ref], gradients: Sequence[Ref], op: Op) -> tuple[Ref, ...]:
        """The values and, for each gradient, the array that is materialised, after a barrier."""
        stored = [self.rewriter.now(self._source(x)) for x in gradients]
        return self.rewriter.wait([*values, *stored], op.source)

    def _source(self, gradient: Ref) -> Ref:
        """The array that is materialised: the narrow source of a widening cast, else the gradient.

        Autocast computes gradients in a narrow dtype. If devices sum a gradient, it is summed in
        the wide dtype, so the wide array is materialised.
        """
        source = gradient
        while not self.is_summed and source in self._copied:
            inner = self._copied[source]
            if inner.spec.dtype.itemsize > source.spec.dtype.itemsize:
                break
            source = inner
        return source

    def _read_after(self, gradients: Sequence[Ref], stored: Sequence[Ref], op: Op) -> None:
        """Has all later operations read gradients from a barrier's results."""
        for gradient, result in zip(gradients, stored):
            dtype = gradient.spec.dtype
            if result.spec.dtype != dtype:
                wide = dtypes.to_jax(dtype)
                entry = inserted("spmd::cast", functools.partial(_cast, wide), gradient.spec)
                result = Ref(
                    self.rewriter.add(entry, [result], op.source, manuals=(gradient.manual,))
                )
            self.rewriter.replace(gradient, result)


def _cast(dtype: np.dtype, inputs: list[jax.Array]) -> jax.Array:
    return inputs[0].astype(dtype)
