"""The dims of operations on rows that are sorted by group, as they are once marks split the rows.

The pass `local_sorts` computes them within each device's part of the rows then. So a sort, reads
and writes at sorted positions, and products by groups keep the rows where they are; the rules of
the operations as they are recorded would have the rows gathered.
"""

import itertools
from collections.abc import Sequence

from spmd_core.program.dim_rules import DimRule, Dims
from spmd_core.program.ir import Graph, Op
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.program.sorted_rows import Role, sorted_rows


def rules(recorded: RecordedGraph) -> dict[int, DimRule]:
    """The rules of such operations, by their positions among the nodes."""
    found: dict[int, DimRule] = {}
    for rows in sorted_rows(Graph.of(recorded)):
        for op, role in rows.roles.items():
            found[op.source.position] = _rule(op, role, rows.num_rows)
    return found


def _rule(op: Op, role: Role, num_rows: int) -> DimRule:
    # The rows of a part of a table, and how many positions there are for each of them.
    table = op.operands[0].spec.shape[0] if role in (Role.READ, Role.WRITE) else num_rows
    sizes = [table, num_rows // table]
    numbers = itertools.count(2)

    def new(size: int) -> tuple[int, ...]:
        sizes.append(size)
        return (next(numbers),)

    rows: tuple[int, ...] = (0, 1) if sizes[1] > 1 else (0,)
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[int] = frozenset()
    whole: tuple[int, ...] = ()
    if role is Role.SORT:
        operands, results = ((rows,),), ((rows,), (rows,))
    elif role in (Role.READ, Role.WRITE):
        others = tuple(new(n) for n in op.operands[0].spec.shape[1:])
        base, values = ((0,), *others), (rows, *others)
        operands = (base, (rows,), values) if role is Role.WRITE else (base, (rows,))
        results = (base,) if role is Role.WRITE else (values,)
        summed = frozenset(rows[1:]) if role is Role.WRITE else summed
    else:
        a, b = (op.operands[i].spec.shape for i in (0, 1))
        groups, left, right = new(op.operands[2].spec.shape[0]), new(a[-2]), new(b[-1])
        if role is Role.SUMS:
            operands, results = ((left, rows), (rows, right)), ((groups, left, right),)
            summed = frozenset(rows)
        else:
            inner = new(a[-1])
            of_rows: tuple[Dims, ...] = ((rows, inner), (groups, inner, right))
            of_columns: tuple[Dims, ...] = ((groups, left, inner), (inner, rows))
            operands = of_rows if role is Role.ROWS else of_columns
            results = ((rows, right),) if role is Role.ROWS else ((left, rows),)
            summed = frozenset(inner)
        operands, whole = (*operands, (groups,)), groups
    tensors = [x.spec.shape for x in op.operands], [x.spec.shape for x in op.results]
    return DimRule(
        tuple(sizes),
        tuple(_without_single(x, shape) for x, shape in zip(operands, tensors[0], strict=True)),
        tuple(_without_single(x, shape) for x, shape in zip(results, tensors[1], strict=True)),
        tuple({f: frozenset() for f in summed} for _ in results),
        tuple(summed for _ in results),
        frozenset(),
        frozenset(whole),
    )


def _without_single(dims: Dims, shape: Sequence[int]) -> Dims:
    """The factors of dims; one of one element has none."""
    return tuple(factors if n > 1 else () for factors, n in zip(dims, shape, strict=True))
