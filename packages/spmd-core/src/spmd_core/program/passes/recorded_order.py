"""Has a CPU's program compute products in the order of recording, so that operands are soon freed.

XLA's CPU compiler puts a value that only the end of the program reads, such as the gradient of a
weight, at the end too. The operands of all these gradients, which are the activations and their
gradients, then live until the end. So each product waits for the products before it, and for the
sums of such products, whose results are read late. On GPU and TPU the compiler orders for memory
and for overlap with communication.
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
    """The graph with barriers before products. Nothing changes in a program without gradients.

    Data and what is marked is read at once: a gather of it may be shared with an earlier product.
    """
    if target.platform != "cpu" or not any("backward" in op.source.name for op in graph.ops):
        return graph
    order = _Order(graph)
    for _, made in groupby(graph.ops, lambda op: op.source.position):
        order.add([*made])
    return order.rewriter.graph()


@dataclass
class _Order:
    """What products wait for, while the graph is walked.

    Attributes:
        graph: the graph.
        rewriter: makes the new one.
    """

    graph: Graph
    rewriter: Rewriter = field(init=False)
    _made: list[Ref] = field(default_factory=list)  # not waited for yet
    _summable: set[Ref] = field(default_factory=set)  # by products and their sums
    _first_use: dict[Ref, int] = field(default_factory=dict)  # by the position of recording

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.graph)
        for op in self.graph.ops:
            for operand in op.operands:
                self._first_use.setdefault(operand, op.source.position)
        for value in self.graph.outputs:
            self._first_use.setdefault(value, len(self.graph.recorded.nodes))

    def add(self, ops: list[Op]) -> None:
        """Adds what was made of one recorded operation."""
        behind: dict[Ref, Ref] = {}
        for op in ops:
            if _is_product(op):
                behind = behind or self._behind(op)
            self.rewriter.keep(op, [behind.get(x) or self.rewriter.now(x) for x in op.operands])
        for op in ops:
            self._made += self._to_wait_for(op)

    def _behind(self, op: Op) -> dict[Ref, Ref]:
        """The operands of a product, behind a barrier for all that was made before."""
        own = [x for x in dict.fromkeys(op.operands) if not _may_be_shared(x)]
        if not own:
            return {}
        position = op.source.position
        late = [
            x for x in self._made if self._first_use.get(x, 0) > position or _is_partial_sum(x.op)
        ]
        self._made = []
        if not late:
            return {}
        found = self.rewriter.wait([self.rewriter.now(x) for x in (*own, *late)], op.source)
        # Of what is local to a region, others read what is behind the barrier, too: XLA drops what
        # nobody reads there, if it has another reader inside of the program, as local sums have.
        for value, result in zip(late, found[len(own) :]):
            if value.manual is not None:
                self.rewriter.replace(value, result)
        return dict(zip(own, found))

    def _to_wait_for(self, op: Op) -> Iterator[Ref]:
        is_product = op.entry.traits.is_product
        # A weight's gradients of several microbatches, for instance, which are added up.
        is_sum = op.entry.name == _ADD and self._summable.issuperset(op.operands)
        # Partial sums of several gradients; those of one are added where it is marked.
        is_joined = op.entry.name == ADDITION and op.source.name == _ADD
        if is_product or is_sum:
            self._summable.update(op.results)
        is_gradient = op.entry.name in (MARK, MARK_AT_ONCE) or _is_partial_sum(op)
        if is_product or is_sum or is_joined or is_gradient:
            yield from op.results


def _is_product(op: Op) -> bool:
    """Whether an operation is a product, or a part of one."""
    entry = op.entry
    if isinstance(entry, PartialSumEntry):
        entry = entry.part.last_op.entry
    return entry.traits.is_product


def _is_partial_sum(op: Op | None) -> bool:
    return op is not None and isinstance(op.entry, PartialSumEntry)


def _may_be_shared(value: Ref) -> bool:
    while (op := value.op) is not None and op.entry.sharding is None:
        source = op.source_of_elements(Elements.PERMUTED)
        if source is None:
            return False
        value = source
    return True
