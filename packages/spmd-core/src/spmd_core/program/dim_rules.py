"""The dims of an operation: which dims of operands are which dims of results, and what is summed.

Shardy has a sharding rule for each StableHLO operation. It describes the dims of operands and
results as factors, of which some are summed (reduction factors), some exchange halos, and some need
replication. Here an entry's kernel is lowered on its own, and the rules of its StableHLO operations
are composed into one rule for the entry.

The rules are derived, and not written beside each kernel: one composition serves every operation,
including a user's jax functions, and cannot disagree with what is lowered. It takes about 6 ms for
an entry (2 to trace it, 4 to lower it), once in a process. That is little for the operations that a
pass asks about, but a second for all operations of a large program, so a pass should ask late, and
about few. What no sharding rule tells is a trait (`ops.kernels.traits`): for instance whether a
kernel, given parts of its operands, computes a part of the sum. A mean does not, as it divides by
the size of the part.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from spmd_core import dtypes
from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.ops.kernels import flash
from spmd_core.ops.kernels.one_block import in_one_block
from spmd_core.ops.kernels.threefry import prng_key
from spmd_core.program.stacked_entries import StackedEntry

# For each dim of a tensor its factors, the major one first; a dim of one element has none.
Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DimRule:
    """The dims of an operation. A factor is a dim, or a part of one where a reshape splits it.

    Attributes:
        sizes: the number of elements along each factor.
        operands: the factors of each operand's dims.
        results: the factors of each result's dims.
        sums: for each result, the factors that it is a sum over: partial results, one for each part
            of such a factor, add up to the result. With each factor come the operands that lack it
            and are added to the sum, such as a bias: only one part may add them.
        reduced: for each result, all factors over which something is reduced to compute it.
        halos: factors along which devices exchange elements, as for the windows of a convolution.
        replicated: factors that must be gathered first, if they are split.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sums: tuple[Mapping[int, frozenset[int]], ...]
    reduced: tuple[frozenset[int], ...]
    halos: frozenset[int]
    replicated: frozenset[int]

    def sources(self, result: int, dim: int) -> tuple[tuple[int, int], ...]:
        """The (operand, dim) pairs from whose shards the shards of a result's dim are computed."""
        return self.dims_of(self.results[result][dim])

    def dims_of(self, factors: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The (operand, dim) pairs that have exactly these factors.

        Empty for factors that need a halo exchange or replication, and if some other dim has only
        a part of them.
        """
        moving = self.halos | self.replicated
        if not factors or not moving.isdisjoint(factors):
            return ()
        found = [
            (i, d, own)
            for i, dims in enumerate(self.operands)
            for d, own in enumerate(dims)
            if not {*own}.isdisjoint(factors)
        ]
        if any(own != factors for _, _, own in found):
            return ()
        return tuple((i, d) for i, d, _ in found)


def dims(entry: Entry, operands: Sequence[Spec]) -> DimRule:
    """The rule of an operation on operands of these specs; cached on the entry."""
    if entry.dims is None:
        entry.dims = _rule(entry, operands)
    found: DimRule = entry.dims
    return found


def dims_in_one_block(entry: Entry, operands: Sequence[Spec]) -> DimRule:
    """As `dims`, for an attention (`Traits.query`) whose kernel may loop over blocks of sequences.

    Nothing is known of the dims of a loop, but the kernel merges none of its leading dims and heads
    with others (`kernels.flash`). So the rule is that of one block without a loop; where there is
    one, sequences and features must be gathered. Not cached.
    """
    query = entry.traits.query
    assert query is not None
    with in_one_block():
        found = _rule(entry, operands)
    lengths = [operands[i].shape[-2] for i in (query, query + 1)]
    if math.prod(lengths) <= flash.MAX_BLOCK**2:
        return found
    in_loop = {f for i in range(query, query + 3) for dim in found.operands[i][-2:] for f in dim}
    return replace(found, replicated=found.replicated | in_loop)


def _rule(entry: Entry, operands: Sequence[Spec]) -> DimRule:
    if entry.border is not None or entry.subgraphs:  # there is no kernel to lower
        return _Module({}).rule(operands, entry)
    arrays = [jax.ShapeDtypeStruct(x.shape, dtypes.to_jax(x.dtype)) for x in operands]
    types = {float: np.float64, int: np.int64, bool: np.bool_, complex: np.complex128}
    shapes: Sequence[tuple[int, ...]] = [()] * len(entry.number_kinds)
    if isinstance(entry, StackedEntry):
        shapes = entry.number_shapes
    numbers = [
        jax.ShapeDtypeStruct(shape, types[kind]) for shape, kind in zip(shapes, entry.number_kinds)
    ]
    outs = tuple(registry.Out(x.shape, x.dtype) for x in entry.outs)

    def dims_of_kernel(arrays: list[jax.Array], values: list[jax.Array]) -> list[jax.Array]:
        given = [registry.Number(x, kind) for x, kind in zip(values, entry.number_kinds)]
        key = prng_key(given.pop().value) if entry.random else None
        found: list[jax.Array] = entry.kernel(registry.Context(outs, "cpu", key), arrays, given)
        return found

    with jax.enable_x64(True):
        lowered = jax.jit(dims_of_kernel, keep_unused=True).lower(arrays, numbers)
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        populate = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        passmanager.PassManager.parse(populate).run(module.operation)
        functions = {f.attributes["sym_name"].value: f for f in module.body.operations}
        return _Module(functions).rule(operands, entry)


# Composing the rules of StableHLO operations.


class _Factor:
    """A factor. While rules are composed, it may be unified with another one, or with several."""

    __slots__ = ("has_halo", "is_replicated", "parts", "size")

    def __init__(self, size: int, *, has_halo: bool = False, is_replicated: bool = False) -> None:
        self.size, self.has_halo, self.is_replicated = size, has_halo, is_replicated
        self.parts: tuple[_Factor, ...] = ()

    def become(self, *parts: "_Factor") -> None:
        """Unifies this factor with one other, or splits it into several."""
        for part in parts:
            part.has_halo |= self.has_halo
            # If a dim with halos is split into parts, its elements move between the parts.
            part.is_replicated |= self.is_replicated or (self.has_halo and len(parts) > 1)
        self.parts = parts

    def last(self) -> "Iterator[_Factor]":
        """The factors that it has been unified with so far; itself if there are none."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.last()


def _last(factors: Iterable[_Factor]) -> list[_Factor]:
    return [x for factor in factors for x in factor.last()]


def _equate(left: Sequence[_Factor], right: Sequence[_Factor]) -> None:
    """Unifies two lists of factors of the same dim."""
    pending, others = _last(left), _last(right)
    while pending and others:
        (a, *pending), (b, *others) = _last(pending), _last(others)
        if a is b:
            continue
        is_single = not pending and not others and (a.has_halo or b.has_halo)
        if a.size == b.size or is_single:
            a.become(b)
        elif a.size % b.size == 0:
            rest = _Factor(a.size // b.size)
            a.become(b, rest)
            pending = [rest, *pending]
        elif b.size % a.size == 0:
            rest = _Factor(b.size // a.size)
            b.become(a, rest)
            others = [rest, *others]
        else:
            pending, others = [a, *pending], [b, *others]
            break
    for factor in _last((*pending, *others)):
        factor.is_replicated = True


@dataclass
class _Value:
    """A value of the module.

    Attributes:
        dims: the factors of its dims.
        sums: the factors that it is a sum over, each with the operands that only one part may add.
        reduced: the other factors over which something was reduced to compute it.
        operand: the number of the entry's operand that it is a copy of, in any shape or dtype;
            None if it is no copy.
        is_zero: whether all its elements are known to be zero.
    """

    dims: list[list[_Factor]]
    sums: dict[_Factor, frozenset[int]] = field(default_factory=dict)
    reduced: set[_Factor] = field(default_factory=set)
    operand: int | None = None
    is_zero: bool = False

    @staticmethod
    def of_shape(shape: Sequence[int], *, is_replicated: bool = False, **facts: Any) -> "_Value":
        return _Value(
            [[_Factor(n, is_replicated=is_replicated)] if n > 1 else [] for n in shape], **facts
        )

    def factors(self) -> set[_Factor]:
        """The factors of all dims."""
        return {*_last(factor for dim in self.dims for factor in dim)}

    def summed(self) -> dict[_Factor, frozenset[int]]:
        """`sums`, by the factors that those have been unified with."""
        return {x: once for factor, once in self.sums.items() for x in factor.last()}

    def depends_on(self, factor: _Factor) -> bool:
        """Whether it has a factor as a dim, or was reduced over it."""
        return factor in self.factors() or factor in {*_last(self.reduced)}


_PASSING = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("reshape", "transpose", "broadcast_in_dim", "convert", "slice", "reverse"),
        *("negate", "real", "imag"),
    )
)
_RULE = "sdy.sharding_rule"
_CALL, _BARRIER = "func.call", "stablehlo.optimization_barrier"
_PRODUCTS = ("stablehlo.multiply", "stablehlo.dot_general", "stablehlo.convolution")
_ADDITIONS = ("stablehlo.add", "stablehlo.subtract", "stablehlo.concatenate")


class _Module:
    """Interprets the functions of a module, given by name."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions

    def rule(self, operands: Sequence[Spec], entry: Entry) -> DimRule:
        """The rule of an entry, whose kernel is the module's main function."""
        given = [_Value.of_shape(x.shape, operand=i) for i, x in enumerate(operands)]
        if "main" in self._functions:
            main = self._functions["main"].regions[0].blocks[0]
            numbers = [_Value.of_shape(_shape(x)) for x in main.arguments[len(given) :]]
            made = self._block(main, [*given, *numbers])
        else:
            made = [_Value.of_shape(x.shape, is_replicated=True) for x in entry.outs]
            for factor in (x for value in given for x in value.factors()):
                factor.is_replicated = True
        # A gradient is split like its operand, even if it does not read that operand, so that the
        # shardings of all results fit together.
        for result, operand in enumerate(entry.traits.gradients):
            position = result if entry.structure is None else entry.structure[result]
            if position is not None:
                for known, own in zip(given[operand].dims, made[position].dims):
                    _equate(known, own)
        return _numbered(given, made)

    def _block(self, block: Any, arguments: Sequence[_Value]) -> list[_Value]:
        values = dict(zip(block.arguments, arguments))
        for child in block.operations:
            op = child.operation
            operands = [values[x] for x in op.operands]
            if op.name == "func.return":
                return operands
            if _RULE not in op.attributes:
                operands += [values[x] for x in _inside(op) if x in values]
            values.update(zip(op.results, self._operation(op, operands)))
        raise AssertionError("a function returns")

    def _operation(self, op: Any, operands: list[_Value]) -> list[_Value]:
        if op.name == _CALL:
            called = self._functions[op.attributes["callee"].value]
            return self._block(called.regions[0].blocks[0], operands)
        if op.name == _BARRIER:
            return operands
        if _RULE in op.attributes:
            return _ruled(op, operands, sdy.OpShardingRuleAttr(op.attributes[_RULE]))
        made = [_Value.of_shape(_shape(x)) for x in op.results]
        if op.name.startswith("chlo."):
            return [_elementwise(operands, value) for value in made]
        if op.name == "stablehlo.constant":
            made[0].is_zero = _is_zero(op.attributes["value"])
        if operands:  # for instance a while loop: nothing is known
            read = {factor for value in operands for factor in value.factors()}
            for value in made:
                value.reduced = read.union(*(x.reduced | {*x.summed()} for x in operands))
            for factor in read.union(*(value.factors() for value in made)):
                factor.is_replicated = True
        return made


def _inside(op: Any) -> Iterator[Any]:
    """The operands of the operations in the regions of an operation, such as a conditional."""
    for region in op.regions:
        for block in region.blocks:
            for child in block.operations:
                yield from child.operation.operands
                yield from _inside(child.operation)


def _elementwise(operands: list[_Value], made: _Value) -> _Value:
    """The result of an elementwise CHLO operation, such as `chlo.erf`, which has no rule."""
    for value in operands:
        made.reduced |= value.reduced | {*value.summed()}
        for factor in value.factors() if len(value.dims) != len(made.dims) else ():
            factor.is_replicated = True
        for known, own in zip(value.dims, made.dims):
            if known and own:
                _equate(known, own)
    return made


def _shape(value: Any) -> Sequence[int]:
    return value.type.shape if isinstance(value.type, ir.ShapedType) else ()


def _is_zero(value: Any) -> bool:
    is_splat = isinstance(value, ir.DenseElementsAttr) and value.is_splat
    # jaxlib does not give the value of a complex constant.
    return is_splat and getattr(value.get_splat_value(), "value", None) == 0


def _ruled(op: Any, operands: list[_Value], rule: Any) -> list[_Value]:
    """The results of an operation that has a sharding rule."""
    moving = {*rule.permutation_factors, *rule.blocked_propagation_factors}
    replicated = {*rule.need_replication_factors}
    factors = [
        _Factor(size, has_halo=i in moving, is_replicated=i in replicated)
        for i, size in enumerate(rule.factor_sizes)
    ]

    def dims(mapping: Any, shape: Sequence[int]) -> Iterator[list[_Factor]]:
        for dim, size in zip(sdy.TensorMappingAttr(mapping).dim_mappings, shape):
            indices = sdy.DimMappingAttr(dim).factor_indices
            own = [factors[i] for i in indices if factors[i].size > 1]
            if math.prod(factor.size for factor in own) != size:
                for factor in own:
                    factor.has_halo = True
            yield own if size > 1 else []

    for value, x, mapping in zip(operands, op.operands, rule.operand_mappings):
        for known, own in zip(value.dims, dims(mapping, _shape(x))):
            if known and own:
                _equate(known, own)
            elif known or own:  # a dim of one element becomes longer, by padding for instance
                for factor in _last((*known, *own)):
                    factor.has_halo = True
    made = [
        _Value([*dims(mapping, _shape(x))]) for x, mapping in zip(op.results, rule.result_mappings)
    ]
    reduced = {*_last(factors[i] for i in rule.reduction_factors if factors[i].size > 1)}
    read = set[_Factor]().union(*(value.factors() for value in operands))
    before = set[_Factor]().union(*(_last(value.reduced) for value in operands))
    summed = set[_Factor]().union(*(value.summed() for value in operands))
    sums = {factor: _once(op, operands, factor) for factor in summed}
    if _adds_up(op, operands):
        sums.update(dict.fromkeys(reduced, frozenset[int]()))
    for value in made:
        lost = read - value.factors()
        value.sums = {factor: once for factor, once in sums.items() if once is not None}
        value.reduced = before | ((lost | summed) - {*value.sums})
        if op.name in _PASSING:
            value.operand, value.is_zero = operands[0].operand, operands[0].is_zero
    return made


def _adds_up(op: Any, operands: list[_Value]) -> bool:
    """Whether an operation is a sum over its reduction factors, without an initial value."""
    if op.name in _PRODUCTS:
        return True
    if op.name == "stablehlo.reduce":
        return _has_sum(op) and operands[-1].is_zero
    return op.name == "stablehlo.scatter" and _has_sum(op) and operands[0].is_zero


def _has_sum(op: Any) -> bool:
    """Whether the region of a reduction or scatter adds its two arguments."""
    (block,) = op.regions[0].blocks
    names = [child.operation.name for child in block.operations]
    return names == ["stablehlo.add", "stablehlo.return"] and len(op.results) == 1


def _once(op: Any, operands: list[_Value], factor: _Factor) -> frozenset[int] | None:
    """The operands that only one part may add, if the operation's result is a sum over the factor.

    Some of the operation's operands are sums over it. Its result is one, too, if the operation is
    linear in them; if it is not, this returns None.
    """
    sums = [i for i, value in enumerate(operands) if factor in value.summed()]
    others = [value for i, value in enumerate(operands) if i not in sums]
    once = frozenset[int]().union(*(operands[i].summed()[factor] for i in sums))
    if any(value.depends_on(factor) for value in operands):
        return None
    is_linear = False
    if op.name in _PASSING:
        is_linear = op.name != "stablehlo.convert" or _keeps_fractions(op)
    elif op.name in _ADDITIONS:
        added = [x for x in others if not x.is_zero]
        is_linear = all(x.operand is not None and not x.summed() for x in added)
        once |= {x.operand for x in added if x.operand is not None}
    elif op.name in (*_PRODUCTS, "stablehlo.divide"):
        is_linear = sums == [0] or (op.name in _PRODUCTS and len(sums) == 1)
    elif op.name in ("stablehlo.reduce", "stablehlo.scatter"):
        is_linear = _adds_up(op, operands) and 1 not in sums
    elif op.name in ("stablehlo.select", "stablehlo.pad"):
        pieces = operands[1:] if op.name == "stablehlo.select" else operands
        is_linear = all(factor in x.summed() or x.is_zero for x in pieces)
        is_linear &= pieces is operands or 0 not in sums
    return once if is_linear else None


def _keeps_fractions(op: Any) -> bool:
    """Whether a conversion is linear: one from floats to integers truncates."""
    before, after = (x.type.element_type for x in (*op.operands, *op.results))
    return not isinstance(after, ir.IntegerType) or isinstance(before, ir.IntegerType)


def _numbered(operands: Sequence[_Value], results: Sequence[_Value]) -> DimRule:
    """The rule, once all factors are known."""
    values = [*operands, *results]
    # A factor that two dims of one tensor share: for instance, a matrix whose diagonal is read.
    for value in values:
        own = _last(factor for dim in value.dims for factor in dim)
        for factor in own:
            factor.is_replicated |= own.count(factor) > 1
    used = [x for value in values for x in _last(factor for dim in value.dims for factor in dim)]
    number = {factor: i for i, factor in enumerate(dict.fromkeys(used))}

    def dims(value: _Value) -> Dims:
        return tuple(tuple(number[x] for x in _last(dim)) for dim in value.dims)

    sums: list[Mapping[int, frozenset[int]]] = []
    reduced = []
    for value in results:
        taken = {number[x] for x in _last(value.reduced) if x in number}
        found = {number[x]: once for x, once in value.summed().items() if x in number}
        kept = {i for dim in dims(value) for i in dim}
        sums.append({i: once for i, once in found.items() if i not in taken and i not in kept})
        reduced.append(frozenset(taken | {*found}))
    return DimRule(
        tuple(factor.size for factor in number),
        tuple(map(dims, operands)),
        tuple(map(dims, results)),
        tuple(sums),
        tuple(reduced),
        frozenset(i for factor, i in number.items() if factor.has_halo),
        frozenset(i for factor, i in number.items() if factor.is_replicated),
    )
