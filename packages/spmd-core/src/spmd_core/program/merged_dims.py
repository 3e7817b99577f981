"""Rewrites equations on arrays with merged dims as equations on the factors of these dims.

An equation that treats all factors of a merged dim alike, such as a product, a reduction or a
transpose, is computed with each factor as a dim of its own. Dims along which positions matter, as
for a concatenation or a cumulative sum, are compacted first, which moves elements.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.program.affine_sizes import GrowthRefusedError, Size, Sizes
from spmd_core.program.padded_arrays import (
    Capacity,
    Padded,
    common_factors,
    compacted,
    with_factors,
)
from spmd_core.program.padded_equation import Equation
from spmd_core.program.padded_rules import PER_ELEMENT, constraint_of

Factors = tuple[Sizes, ...]
# (equation, its operands with merged dims) -> the equation without merged dims, and the factors of
# each result
Unmerged = tuple[Equation, list[Factors]]
Rule = Callable[[Equation], Unmerged]


def unmerged(eqn: Equation) -> Unmerged:
    """The equation with each factor of a merged dim as a dim, and the factors of its results."""
    rule = _RULES.get(eqn.name)
    if rule is not None and any(not x.is_plain for x in eqn.read):
        return rule(eqn)
    read = [compacted(eqn.capacity, x) for x in eqn.read]
    return replace(eqn, read=read), [_plain(sizes) for sizes in eqn.outs]


def uniform_dims(eqn: Equation) -> frozenset[int]:
    """The dims of the result along which all its elements are known to be equal."""
    outs = eqn.outs[0]
    if eqn.name == "iota":
        return frozenset(range(len(outs))) - {eqn.param("dimension")}
    if eqn.name == "broadcast_in_dim":
        (x, *_), dims = eqn.read, eqn.param("broadcast_dimensions")
        varying = {j for d, j in enumerate(dims) if x.sizes[d] != 1 and d not in x.uniform}
        return frozenset(range(len(outs))) - varying
    if eqn.name in PER_ELEMENT:
        dims = {*range(len(outs))}
        for x in eqn.read:
            dims -= {d for d, size in enumerate(x.sizes) if size != 1 and d not in x.uniform}
        return frozenset(dims)
    return frozenset()


def _plain(sizes: Sizes) -> Factors:
    return tuple((size,) for size in sizes)


def _flat(factors: Factors) -> Sizes:
    return tuple(size for own in factors for size in own)


def _positions(factors: Factors, dims: Iterable[int]) -> list[int]:
    """The positions of the factors of these dims among all factors."""
    starts = np.cumsum([0, *(len(own) for own in factors)])
    return [int(starts[d]) + k for d in dims for k in range(len(factors[d]))]


def _each(factors: Factors, values: Sequence[Any], along_merged: Any) -> tuple[Any, ...]:
    """Values by dim as values by factor; the factors of merged dims get `along_merged`."""
    found: list[Any] = []
    for own, value in zip(factors, values, strict=True):
        found += [value] if len(own) == 1 else [along_merged] * len(own)
    return tuple(found)


def _alike(capacity: Capacity, operands: Sequence[Padded]) -> list[Padded]:
    """Operands of equal shape, with the same factors."""
    factors = common_factors(operands)
    return [with_factors(capacity, x, factors) for x in operands]


def _per_element(eqn: Equation) -> Unmerged:
    """Operands of the result's shape get the same factors; dims of one element are broadcast."""
    outs = eqn.outs[0]
    factors: list[Sizes] = []
    for dim, size in enumerate(outs):
        wide = [_dim(x, dim) for x in eqn.read if x.sizes and x.sizes[dim] == size]
        factors.append(common_factors(wide)[0])
    read = []
    for x in eqn.read:
        if x.sizes:
            own = tuple(f if n == m else (n,) for f, n, m in zip(factors, x.sizes, outs))
            x = with_factors(eqn.capacity, x, own)
            shape = [
                1 if n != m else eqn.capacity.at_bound(size)
                for f, n, m in zip(factors, x.sizes, outs)
                for size in f
            ]
            sizes = tuple(
                1 if n != m else size for f, n, m in zip(factors, x.sizes, outs) for size in f
            )
            x = Padded.plain(x.array.reshape(shape), sizes)
        read.append(x)
    found = tuple(factors)
    return eqn.with_params(read, [_flat(found)]), [found]


def _dim(x: Padded, dim: int) -> Padded:
    """The facts about one dim, without the array."""
    uniform = frozenset({0}) if dim in x.uniform else frozenset()
    return Padded(None, (x.sizes[dim],), (x.factors[dim],), uniform)


def _each_operand(eqn: Equation) -> Unmerged:
    read = [x.flat for x in eqn.read]
    return eqn.with_params(read, [x.sizes for x in read]), [x.factors for x in eqn.read]


def _broadcast(eqn: Equation) -> Unmerged:
    (x, *_), dims = eqn.read, eqn.param("broadcast_dimensions")
    factors: list[Sizes] = [(size,) for size in eqn.outs[0]]
    for d, j in enumerate(dims):
        if x.sizes[d] == eqn.outs[0][j]:
            factors[j] = x.factors[d]
    found = tuple(factors)
    shape = _flat(found)
    changed = {"shape": shape, "broadcast_dimensions": tuple(_positions(found, dims))}
    return eqn.with_params([x.flat], [shape], **changed), [found]


def _transpose(eqn: Equation) -> Unmerged:
    x, order = eqn.read[0], eqn.param("permutation")
    found = tuple(x.factors[d] for d in order)
    return eqn.with_params([x.flat], [_flat(found)], permutation=tuple(x.all_dims_of(order))), [
        found
    ]


def _reduction(eqn: Equation) -> Unmerged:
    x, axes = eqn.read[0], eqn.param("axes")
    if eqn.name in ("argmax", "argmin"):
        x = compacted(eqn.capacity, x, axes)
    found = tuple(own for d, own in enumerate(x.factors) if d not in axes)
    changed = {"axes": tuple(x.all_dims_of(axes))}
    return eqn.with_params([x.flat], [_flat(found)], **changed), [found]


def _dot_general(eqn: Equation) -> Unmerged:
    a, b = eqn.read
    (left, right), (batch_left, batch_right) = eqn.param("dimension_numbers")
    factors_a, factors_b = [*a.factors], [*b.factors]
    for i, j in zip((*left, *batch_left), (*right, *batch_right)):
        shared = common_factors([_dim(a, i), _dim(b, j)])[0]
        factors_a[i] = factors_b[j] = shared
    a = with_factors(eqn.capacity, a, tuple(factors_a))
    b = with_factors(eqn.capacity, b, tuple(factors_b))
    free_a = [d for d in range(len(a.sizes)) if d not in (*left, *batch_left)]
    free_b = [d for d in range(len(b.sizes)) if d not in (*right, *batch_right)]
    found = (
        *(a.factors[d] for d in (*batch_left, *free_a)),
        *(b.factors[d] for d in free_b),
    )
    pairs = ((left, right), (batch_left, batch_right))
    numbers = tuple((tuple(a.all_dims_of(x)), tuple(b.all_dims_of(y))) for x, y in pairs)
    flat = eqn.with_params([a.flat, b.flat], [_flat(found)], dimension_numbers=numbers)
    return flat, [found]


def _along(name: str) -> Rule:
    """A rule for operands of one shape, and operations along one dim or some dims."""

    def rule(eqn: Equation) -> Unmerged:
        dims = eqn.param(name)
        chosen = {dims} if isinstance(dims, int) else {*dims}
        read = [compacted(eqn.capacity, x, chosen) for x in eqn.read]
        # The operands of a concatenation have different sizes along its dim, which is not merged.
        others = common_factors(read)
        read = [
            with_factors(
                eqn.capacity,
                x,
                tuple(x.factors[d] if d in chosen else own for d, own in enumerate(others)),
            )
            for x in read
        ]
        own = read[0].factors
        places = tuple(_positions(own, [dims] if isinstance(dims, int) else dims))
        found = [
            tuple((sizes[d],) if d in chosen else own[d] for d in range(len(own)))
            for sizes in eqn.outs
        ]
        changed = {name: places[0] if isinstance(dims, int) else places}
        flat = [_flat(f) for f in found]
        return eqn.with_params([x.flat for x in read], flat, **changed), found

    return rule


def _stack(eqn: Equation) -> Unmerged:
    read, axis = _alike(eqn.capacity, eqn.read), eqn.param("axis")
    own = read[0].factors
    found = (*own[:axis], (len(read),), *own[axis:])
    place = _positions(found, [axis])[0]
    return eqn.with_params([x.flat for x in read], [_flat(found)], axis=place), [found]


def _unstack(eqn: Equation) -> Unmerged:
    axis = eqn.param("axis")
    x = compacted(eqn.capacity, eqn.read[0], [axis])
    found = tuple(own for d, own in enumerate(x.factors) if d != axis)
    results = [found for _ in eqn.outs]
    flat = [_flat(found) for _ in eqn.outs]
    return eqn.with_params([x.flat], flat, axis=x.dims_of(axis)[0]), results


def _squeeze(eqn: Equation) -> Unmerged:
    x, dims = eqn.read[0], eqn.param("dimensions")
    found = tuple(own for d, own in enumerate(x.factors) if d not in dims)
    changed = {"dimensions": tuple(x.all_dims_of(dims))}
    return eqn.with_params([x.flat], [_flat(found)], **changed), [found]


def _slice(eqn: Equation) -> Unmerged:
    x, starts, strides = eqn.read[0], eqn.param("start_indices"), eqn.param("strides")
    strides = (1,) * len(starts) if strides is None else strides
    kept = [
        start == 0 and stride == 1 and n == m
        for start, stride, n, m in zip(starts, strides, x.sizes, eqn.outs[0])
    ]
    x = compacted(eqn.capacity, x, [d for d, k in enumerate(kept) if not k])
    found = tuple(x.factors[d] if k else (eqn.outs[0][d],) for d, k in enumerate(kept))
    changed = {
        "start_indices": _each(x.factors, starts, 0),
        "strides": _each(x.factors, strides, 1),
    }
    return eqn.with_params([x.flat], [_flat(found)], **changed), [found]


def _dynamic_slice(eqn: Equation) -> Unmerged:
    x, *starts = eqn.read
    cut = [d for d, (n, m) in enumerate(zip(x.sizes, eqn.outs[0])) if n != m]
    x = compacted(eqn.capacity, x, cut)
    found = tuple((eqn.outs[0][d],) if d in cut else own for d, own in enumerate(x.factors))
    first = Padded.plain(np.zeros((), np.dtype(starts[0].array.dtype)), ())
    places = _each(x.factors, starts, first)
    flat = _flat(found)
    return eqn.with_params([x.flat, *places], [flat], slice_sizes=flat), [found]


def _pad(eqn: Equation) -> Unmerged:
    (x, value), config = eqn.read, eqn.param("padding_config")
    nothing = (0, 0, 0)
    padded = [d for d, own in enumerate(config) if tuple(own) != nothing]
    x = compacted(eqn.capacity, x, padded)
    found = tuple((eqn.outs[0][d],) if d in padded else own for d, own in enumerate(x.factors))
    changed = {"padding_config": _each(x.factors, config, nothing)}
    return eqn.with_params([x.flat, value], [_flat(found)], **changed), [found]


def _top_k(eqn: Equation) -> Unmerged:
    x = eqn.read[0]
    dim = (eqn.param("axis") if "axis" in eqn.first else -1) % len(x.sizes)
    x = compacted(eqn.capacity, x, [dim])
    found = [
        tuple((sizes[d],) if d == dim else own for d, own in enumerate(x.factors))
        for sizes in eqn.outs
    ]
    changed = {"axis": x.dims_of(dim)[0]} if "axis" in eqn.first else {}
    return eqn.with_params([x.flat], [_flat(f) for f in found], **changed), found


def _constraint(eqn: Equation) -> Unmerged:
    """A merged dim is split as its major factor, if each shard has whole rows of the others."""
    x, sharding = eqn.read[0], constraint_of(eqn)
    spec = getattr(sharding, "spec", None)
    if not isinstance(sharding, NamedSharding) or spec is None:
        raise GrowthRefusedError("a dim that grows is split")
    axes: list[Any] = []
    for dim, own in enumerate(x.factors):
        given = spec[dim] if dim < len(spec) else None
        rest = PartitionSpec.UNCONSTRAINED if given is PartitionSpec.UNCONSTRAINED else None
        if len(own) > 1 and given not in (None, (), PartitionSpec.UNCONSTRAINED):
            names = given if isinstance(given, tuple) else (given,)
            shards = int(np.prod([sharding.mesh.shape[name] for name in names]))
            if not isinstance(own[0], int) or own[0] % shards:
                raise GrowthRefusedError("a dim that grows is split")
        axes += [given, *(rest for _ in own[1:])]
    name = "sharding" if "sharding" in eqn.first else "dst_sharding"
    changed: dict[str, Any] = {name: NamedSharding(sharding.mesh, PartitionSpec(*axes))}
    if "unconstrained_dims" in eqn.first:
        free = {*eqn.param("unconstrained_dims")}
        changed["unconstrained_dims"] = {*x.all_dims_of(free)}
    return eqn.with_params([x.flat], [x.flat.sizes], **changed), [x.factors]


def _gather(eqn: Equation) -> Unmerged:
    x, indices = eqn.read
    numbers, sizes = eqn.param("dimension_numbers"), eqn.param("slice_sizes")
    x = compacted(eqn.capacity, x, numbers.start_index_map)
    last = len(indices.sizes) - 1
    indices = compacted(eqn.capacity, indices, [last])
    x, indices = _same_batches(eqn, x, indices, numbers)
    offsets = [
        d
        for d in range(len(x.sizes))
        if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
    ]
    for d in offsets:
        if len(x.factors[d]) > 1 and sizes[d] != x.sizes[d]:
            raise GrowthRefusedError("a gather takes part of a dim that grows")
    rest, windows = iter(range(last)), iter(offsets)
    found: Factors = ()
    for j, size in enumerate(eqn.outs[0]):
        if j in numbers.offset_dims:
            d = next(windows)
            found = (*found, x.factors[d] if len(x.factors[d]) > 1 else (size,))
        else:
            found = (*found, indices.factors[next(rest)])
    new_sizes: list[Size] = []
    for d, own in enumerate(x.factors):
        in_batch = d in numbers.operand_batching_dims or d in numbers.collapsed_slice_dims
        new_sizes += [sizes[d]] if len(own) == 1 else [1] * len(own) if in_batch else own
    flat_numbers = numbers._replace(
        offset_dims=tuple(_positions(found, numbers.offset_dims)),
        collapsed_slice_dims=tuple(x.all_dims_of(numbers.collapsed_slice_dims)),
        start_index_map=tuple(x.all_dims_of(numbers.start_index_map)),
        operand_batching_dims=tuple(x.all_dims_of(numbers.operand_batching_dims)),
        start_indices_batching_dims=tuple(indices.all_dims_of(numbers.start_indices_batching_dims)),
    )
    changed = {"dimension_numbers": flat_numbers, "slice_sizes": tuple(new_sizes)}
    return eqn.with_params([x.flat, indices.flat], [_flat(found)], **changed), [found]


def _same_batches(eqn: Equation, x: Padded, indices: Padded, numbers: Any) -> tuple[Padded, Padded]:
    """The operand and the indices of a gather or scatter, with the same factors of batch dims."""
    own = getattr(numbers, "start_indices_batching_dims", None)
    if own is None:
        own = numbers.scatter_indices_batching_dims
    left, right = [*x.factors], [*indices.factors]
    for i, j in zip(numbers.operand_batching_dims, own, strict=True):
        left[i] = right[j] = common_factors([_dim(x, i), _dim(indices, j)])[0]
    return (
        with_factors(eqn.capacity, x, tuple(left)),
        with_factors(eqn.capacity, indices, tuple(right)),
    )


def _scatter(eqn: Equation) -> Unmerged:
    x, indices, updates = eqn.read
    numbers = eqn.param("dimension_numbers")
    last = len(indices.sizes) - 1
    x = compacted(eqn.capacity, x, numbers.scatter_dims_to_operand_dims)
    indices = compacted(eqn.capacity, indices, [last])
    x, indices = _same_batches(eqn, x, indices, numbers)
    windows = [
        d
        for d in range(len(x.sizes))
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    rest, window = iter(range(last)), iter(windows)
    factors, own = [*updates.factors], [*indices.factors]
    for j, size in enumerate(updates.sizes):
        if j in numbers.update_window_dims:
            d = next(window)
            if len(x.factors[d]) > 1 and size != x.sizes[d]:
                raise GrowthRefusedError("a scatter writes part of a dim that grows")
            factors[j] = x.factors[d] if len(x.factors[d]) > 1 else (size,)
        else:
            k = next(rest)
            in_batch = k in numbers.scatter_indices_batching_dims
            shared = common_factors([_dim(indices, k), _dim(updates, j)])[0]
            factors[j] = own[k] = own[k] if in_batch else shared
    updates = with_factors(eqn.capacity, updates, tuple(factors))
    indices = with_factors(eqn.capacity, indices, tuple(own))
    changed = numbers._replace(
        update_window_dims=tuple(updates.all_dims_of(numbers.update_window_dims)),
        inserted_window_dims=tuple(x.all_dims_of(numbers.inserted_window_dims)),
        scatter_dims_to_operand_dims=tuple(x.all_dims_of(numbers.scatter_dims_to_operand_dims)),
        operand_batching_dims=tuple(x.all_dims_of(numbers.operand_batching_dims)),
        scatter_indices_batching_dims=tuple(
            indices.all_dims_of(numbers.scatter_indices_batching_dims)
        ),
    )
    read = [x.flat, indices.flat, updates.flat]
    return eqn.with_params(read, [x.flat.sizes], dimension_numbers=changed), [x.factors]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(PER_ELEMENT, _per_element),
    **dict.fromkeys(
        [f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")],
        _reduction,
    ),
    **dict.fromkeys(["argmax", "argmin"], _reduction),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul"], _scatter
    ),
    **dict.fromkeys(["scatter_max", "scatter-max", "scatter_min", "scatter-min"], _scatter),
    **dict.fromkeys(["concatenate", "sort"], _along("dimension")),
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "optimization_barrier": _each_operand,
    "pad": _pad,
    "reshard": _constraint,
    "rev": _along("dimensions"),
    "sharding_constraint": _constraint,
    "slice": _slice,
    "split": _along("axis"),
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
