"""Manual regions on padded arrays: each device evaluates the region's function on its blocks.

A region may split dims of fixed size, and merged dims along a fixed major factor. The size that
varies is then the same on each device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from spmd_core.program.affine_sizes import Affine, Fit, GrowthRefusedError, Sizes, shape_of, times
from spmd_core.program.padded_arrays import Capacity, Padded, compacted

# (function at the first value, at the second, arguments, capacity) -> results
Run = Callable[[ClosedJaxpr, ClosedJaxpr, Sequence[Padded], Capacity], list[Padded]]


def evaluated(
    first: JaxprEqn,
    second: JaxprEqn,
    read: Sequence[Padded],
    *,
    fit: Fit,
    capacity: Capacity,
    run: Run,
) -> list[Padded]:
    """The results of a `shard_map`.

    Args:
        first: the equation at the first value of the number.
        second: the equation at the second value.
        read: the inputs.
        fit: how integers depend on the number.
        capacity: the values of the number for which arrays are padded.
        run: evaluates a function.

    Raises:
        GrowthRefusedError: a dim of varying size is split.
    """
    params = first.params
    mesh = params["mesh"]
    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    inner, other = _closed(params["jaxpr"]), _closed(second.params["jaxpr"])
    blocks = [
        _block(x, spec, mesh.shape, fit.sizes(shape_of(v), shape_of(w)))
        for x, spec, v, w in zip(
            read, params["in_specs"], inner.jaxpr.invars, other.jaxpr.invars, strict=True
        )
    ]
    sizes = [fit.sizes(shape_of(v), shape_of(w)) for v, w in zip(first.outvars, second.outvars)]
    own = [
        fit.sizes(shape_of(v), shape_of(w))
        for v, w in zip(inner.jaxpr.outvars, other.jaxpr.outvars)
    ]
    outs = [_Out(*x) for x in zip(sizes, own, params["out_specs"], strict=True)]

    def function(number: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        here = Capacity(capacity.bound, number)
        arguments = [block.padded(x) for block, x in zip(blocks, arrays)]
        results = run(inner, other, arguments, here)
        return [out.local(here, x) for out, x in zip(outs, results)]

    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(PartitionSpec(), *(block.spec for block in blocks)),
        out_specs=[out.spec for out in outs],
        axis_names=set(axes),
        check_vma=False,
    )
    arrays = mapped(capacity.number, *(x.array for x in read))
    return [Padded(x, out.sizes, out.factors) for x, out in zip(arrays, outs)]


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _names(spec: PartitionSpec, dim: int) -> Any:
    return (spec[dim] if dim < len(spec) else None) or None


class _Block:
    """How an input is split into blocks."""

    def __init__(self, spec: PartitionSpec, sizes: Sizes, factors: tuple[Sizes, ...]) -> None:
        self.spec, self.sizes, self.factors = spec, sizes, factors

    def padded(self, array: jax.Array) -> Padded:
        """A device's block; major factors of one element are left out."""
        shape: list[int] = []
        dims = iter(array.shape)
        factors: list[Sizes] = []
        for own in self.factors:
            sizes = [next(dims) for _ in own]
            kept = own[1:] if len(own) > 1 and own[0] == 1 else own
            shape += sizes[len(own) - len(kept) :]
            factors.append(kept)
        return Padded(array.reshape(shape), self.sizes, tuple(factors))


def _block(x: Padded, spec: PartitionSpec, mesh_shape: Any, sizes: Sizes) -> _Block:
    """How `x` is split into blocks of these sizes."""
    axes: list[Any] = []
    factors: list[Sizes] = []
    for dim, (own, size) in enumerate(zip(x.factors, sizes)):
        names = _names(spec, dim)
        axes += [names, *(None for _ in own[1:])]
        if names is None:
            factors.append(own)
        elif len(own) == 1 and isinstance(own[0], int):
            factors.append((size,))
        else:
            num = 1
            for name in names if isinstance(names, tuple) else (names,):
                num *= mesh_shape[name]
            if not isinstance(own[0], int) or own[0] % num:
                raise GrowthRefusedError("a dim that grows is split over devices")
            factors.append((own[0] // num, *own[1:]))
    return _Block(PartitionSpec(*axes), sizes, tuple(factors))


class _Out:
    """How a result is joined from blocks.

    If a dim of varying size is split, the number of shards becomes its major factor.
    """

    def __init__(self, sizes: Sizes, own: Sizes, spec: PartitionSpec) -> None:
        self.sizes = sizes
        axes: list[Any] = []
        factors: list[Sizes] = []
        self._split: list[int] = []
        for dim, (size, local) in enumerate(zip(sizes, own)):
            names = _names(spec, dim)
            if names is not None and isinstance(size, Affine):
                num = size.slope // local.slope if isinstance(local, Affine) else 0
                if not num or times(local, num) != size:
                    raise GrowthRefusedError("a dim that grows is split over devices")
                self._split.append(dim)
                axes += [names, None]
                factors.append((num, local))
            else:
                axes.append(names)
                factors.append((size,))
        self.spec, self.factors = PartitionSpec(*axes), tuple(factors)

    def local(self, capacity: Capacity, x: Padded) -> jax.Array:
        """A device's block of the result."""
        array: jax.Array = compacted(capacity, x).array
        for dim in reversed(self._split):
            array = array.reshape((*array.shape[:dim], 1, *array.shape[dim:]))
        return array
