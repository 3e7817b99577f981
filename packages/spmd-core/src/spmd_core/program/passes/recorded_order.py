"""Has a CPU compute products in the order of recording, so that their operands are freed early.

XLA's CPU scheduler computes a value that is only read at the end of the program, such as the
gradient of a weight, at the end. The operands of all these gradients, which are activations and
their gradients, then live until the end. So this pass has each product wait for the earlier
products whose results are read late, and for the sums of such products. On GPU and TPU the
schedulers already take memory, and overlap with communication, into account.

A barrier also keeps the transpose of a first factor apart from its product. The transposed copy and
the product of it, by YNNPACK, take less time than Eigen's product of a factor that is transposed
(`benchmarks/folded_steps.py` has steps with such products). Where loops go over layers, a weight's
gradient has such a factor: what forward has kept, which is an input of the body.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter
from spmd_core.program.mark_names import MARK, MARK_AT_ONCE
from spmd_core.program.partial_sums import ADDITION, PartialSumEntry
from spmd_core.program.target import Target

_ADD = "aten::add.Tensor"


def recorded_order(graph: Graph, target: Target) -> Graph:
    """The graph with barriers before products; unchanged if there are no gradients.

    Inputs and marked values are read without a barrier, because an earlier product may share their
    gather; but for transposed first factors, which no product of the forward pass reads.
    """
    if target.platform != "cpu" or not any("backward" in op.source.name for op in graph.ops):
        return graph
    order = _Order(graph)
    for _, made in groupby(graph.ops, lambda op: op.source.position):
        order.add([*made])
    return order.rewriter.graph()


@dataclass
class _Order:
    """The walk over the graph, and the values that products have to wait for.

    Attributes:
        graph: the graph.
        rewriter: makes the new graph.
    """

    graph: Graph
    rewriter: Rewriter = field(init=False)
    _made: list[Ref] = field(default_factory=list)  # not waited for yet
    _summable: set[Ref] = field(default_factory=set)  # results of products and of their sums
    _first_use: dict[Ref, int] = field(default_factory=dict)  # the position of the first reader

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.graph)
        for op in self.graph.ops:
            for operand in op.operands:
                self._first_use.setdefault(operand, op.source.position)
        for value in self.graph.outputs:
            self._first_use.setdefault(value, len(self.graph.recorded.nodes))

    def add(self, ops: list[Op]) -> None:
        """Adds the operations that passes have made of one recorded operation."""
        after: dict[Ref, Ref] = {}
        for op in ops:
            if _is_product(op):
                after = after or self._after_earlier(op)
            self.rewriter.keep(op, [after.get(x) or self.rewriter.now(x) for x in op.operands])
        for op in ops:
            self._made += self._to_wait_for(op)

    def _after_earlier(self, op: Op) -> dict[Ref, Ref]:
        """The operands of a product, after a barrier for the earlier values."""
        apart = {x for x in op.operands[:1] if _is_transposed(x)}
        own = [x for x in dict.fromkeys(op.operands) if x in apart or not _may_be_shared(x)]
        if not own:
            return {}
        position = op.source.position
        late = [
            x for x in self._made if self._first_use.get(x, 0) > position or _is_partial_sum(x.op)
        ]
        self._made = []
        if not late and not apart:
            return {}
        found = self.rewriter.wait([self.rewriter.now(x) for x in (*own, *late)], op.source)
        # Later operations read a region's local value from the barrier. XLA drops a barrier's
        # result that nothing reads, if the program has another reader of the operand, as for
        # partial sums.
        for value, result in zip(late, found[len(own) :]):
            if value.manual is not None:
                self.rewriter.replace(value, result)
        return dict(zip(own, found))

    def _to_wait_for(self, op: Op) -> Iterator[Ref]:
        is_product = op.entry.traits.is_product
        # For instance, the gradients of a weight for several microbatches.
        is_sum = op.entry.name == _ADD and self._summable.issuperset(op.operands)
        # Partial sums of several gradients. Those of one gradient are added up at its mark.
        is_joined = op.entry.name == ADDITION and op.source.name == _ADD
        if is_product or is_sum:
            self._summable.update(op.results)
        is_gradient = op.entry.name in (MARK, MARK_AT_ONCE) or _is_partial_sum(op)
        if is_product or is_sum or is_joined or is_gradient:
            yield from op.results


def _is_product(op: Op) -> bool:
    """Whether an operation is a product, or the partial sum of one."""
    entry = op.entry
    if isinstance(entry, PartialSumEntry):
        entry = entry.part.last_op.entry
    return entry.traits.is_product


def _is_partial_sum(op: Op | None) -> bool:
    return op is not None and isinstance(op.entry, PartialSumEntry)


def _is_transposed(value: Ref) -> bool:
    """Whether a value is the transpose of a matrix."""
    op = value.op
    if op is None or len(op.entry.spec.shape) != 2:
        return False
    return op.entry.traits.elements is Elements.PERMUTED


def _may_be_shared(value: Ref) -> bool:
    while (op := value.op) is not None and op.entry.sharding is None:
        source = op.source_of_elements(Elements.PERMUTED)
        if source is None:
            return False
        value = source
    return True
