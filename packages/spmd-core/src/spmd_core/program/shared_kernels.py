"""Traces the kernel of operations that do the same once, and repeats its equations for the others.

A deep model has few distinct operations, each of them in every layer. Running a kernel's Python
costs some hundred microseconds, and repeating what it traced a tenth of that. The program is the
same: the equations are repeated in place. Calls of one function for each distinct operation are
lowered faster still, by a tenth, and need XLA to inline them before it partitions; its compile time
is the same (`benchmarks/results/compile_once.md`).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal, Primitive

from spmd_core.ops.registry import Number
from spmd_core.program.ir import Op

# (arrays, numbers) -> results
Kernel = Callable[[list[jax.Array], list[Number]], Sequence[jax.Array]]


@dataclass(frozen=True)
class _Traced:
    """A kernel as one equation that jax's tracer inlines.

    Attributes:
        primitive: of the equation.
        params: its parameters.
        read: the positions of its operands among the arguments.
        results: for each result of the kernel, the position among the equation's results; of one
            that is an argument, `~` of the argument's position.
    """

    primitive: Primitive
    params: dict[str, Any]
    read: tuple[int, ...]
    results: tuple[int, ...]

    def __call__(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        made = self.primitive.bind(*(arguments[i] for i in self.read), **self.params)
        return [made[i] if i >= 0 else arguments[~i] for i in self.results]


class SharedKernels:
    """The kernels of one program.

    Args:
        ops: all operations of the program. Only what occurs among them more than once is shared.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._counts = Counter(_what(op) for op in ops)
        self._traced: dict[Hashable, _Traced | None] = {}

    def results(
        self, op: Op, kernel: Kernel, arrays: list[jax.Array], numbers: list[Number]
    ) -> Sequence[jax.Array]:
        """The results of an operation.

        Args:
            op: the operation.
            kernel: computes it. It depends on what the operation does (`Entry.key` of those that
                passes insert, the entry of any other), on its hint and its manual region, and on
                nothing else of the operation.
            arrays: its operands.
            numbers: its scalar inputs.
        """
        what = _what(op)
        if self._counts[what] < 2:
            return kernel(arrays, numbers)
        arguments, tree = jax.tree.flatten((arrays, numbers))
        # Types of equal shapes may differ in being weak.
        key = what, tree, tuple(jax.typeof(x) for x in arguments)
        if key not in self._traced:
            self._traced[key] = _trace(kernel, tree, arguments)
        traced = self._traced[key]
        return kernel(arrays, numbers) if traced is None else traced(arguments)

    def clear(self) -> None:
        """Drops what was traced, which refers to the graph."""
        self._traced.clear()


def _what(op: Op) -> Hashable:
    """Operations of which this is equal have the same kernel."""
    entry: Hashable = op.entry
    if op.is_inserted and op.entry.key is not None:
        entry = op.entry.key
    return entry, op.hint, op.manuals, tuple(operand.manual for operand in op.operands)


def _trace(
    kernel: Kernel, tree: jax.tree_util.PyTreeDef, arguments: Sequence[jax.Array]
) -> _Traced | None:
    """The kernel for arguments of these types; None if this jax does not trace it as expected.

    Args:
        kernel: the kernel.
        tree: of its arrays and numbers.
        arguments: the leaves of that tree.
    """

    def function(*values: jax.Array) -> Sequence[jax.Array]:
        arrays, numbers = tree.unflatten(values)
        return kernel(arrays, numbers)

    closed = jax.make_jaxpr(jax.jit(function))(*arguments)
    position = {x: i for i, x in enumerate(closed.jaxpr.invars)}
    if closed.consts or len(closed.jaxpr.eqns) != 1:
        return None
    (eqn,) = closed.jaxpr.eqns
    made = {x: i for i, x in enumerate(eqn.outvars)} | {x: ~i for x, i in position.items()}
    results = closed.jaxpr.outvars
    if "inline" not in eqn.params or any(isinstance(x, Literal) for x in (*results, *eqn.invars)):
        return None
    kept = eqn.params["inline"]  # a bool; from jax 0.12 on a member of `jax.Inline`
    inlined = True if isinstance(kept, bool) else type(kept).JAX_EARLY
    return _Traced(
        eqn.primitive,
        {**eqn.params, "inline": inlined},
        tuple(position[x] for x in eqn.invars),
        tuple(made[x] for x in results),
    )
