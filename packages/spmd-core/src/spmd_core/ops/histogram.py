"""Histograms: the number of values (or the sum of their weights) in each bin, and the bins' edges.

Without a given range, the range is the data's own, computed on the device. Where that range is not
finite, eager torch raises; a compiled program cannot raise, and its histogram is NaN. A value on an
edge belongs to the bin on the edge's right, and on the last edge to the last bin. NaN and values
outside of the range belong to no bin.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd_core.ops.registry import Context, as_array, lowering

# ---- the meta kernels that torch lacks: torch's checks, and the shapes ---------------------------


def _check_data(x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(
            f'"histogramdd" not implemented for {x.dtype}; '
            "convert the input to torch.float32 or torch.float64."
        )
    if x.dim() < 2:
        raise RuntimeError(
            "torch.histogramdd: input tensor should have at least 2 dimensions, but got "
            f"{x.dim()}. Put one point into each row."
        )
    if x.shape[-1] != num_dims:
        raise RuntimeError(
            "histogramdd: The size of bins must be equal to the innermost dimension of the input: "
            f"expected {x.shape[-1]} sequences of bin edges for a {x.shape[-1]}-dimensional "
            f"histogram but got {num_dims}. Give the bins of each dimension."
        )
    if weight is not None and weight.shape != x.shape[:-1]:
        raise RuntimeError(
            "torch.histogramdd: if weight tensor is provided it should have the same shape as the "
            "input tensor excluding its innermost dimension, but got input with shape "
            f"{list(x.shape)}, and weight with shape {list(weight.shape)}. Give each point one "
            "weight."
        )
    if weight is not None and weight.dtype != x.dtype:
        raise RuntimeError(
            "torch.histogramdd: if weight tensor is provided, input tensor and weight tensor "
            f"should have the same dtype, but got input({x.dtype}), and weight({weight.dtype}). "
            "Convert the weight."
        )


def _check_counts(counts: Sequence[int], range: Sequence[float] | None) -> None:
    for d, count in enumerate(counts):
        if count <= 0:
            raise RuntimeError(
                f"torch.histogram(): bins must be > 0, but got {count} for dimension {d}. "
                "Give at least one bin."
            )
    if range is None:
        return
    if len(range) != 2 * len(counts):
        raise RuntimeError(
            f"torch.histogramdd: for a {len(counts)}-dimensional histogram range should have "
            f"{2 * len(counts)} elements, but got {len(range)}. "
            "Give a minimum and a maximum for each dimension."
        )
    for d, (low, high) in enumerate(zip(range[::2], range[1::2])):
        if not math.isfinite(low) or not math.isfinite(high):
            raise RuntimeError(
                f"torch.histogramdd: dimension {d}'s range [{low}, {high}] is not finite. "
                "Give two finite numbers."
            )
        if low > high:
            raise RuntimeError(
                f"torch.histogramdd: min should not exceed max, but got min {low} max {high} for "
                f"dimension {d}. Give the smaller number first."
            )


def _check_edges(x: torch.Tensor, edges: Sequence[torch.Tensor]) -> None:
    for d, dim_edges in enumerate(edges):
        if dim_edges.dim() != 1:
            raise RuntimeError(
                "torch.histogramdd: bins tensor should have one dimension, "
                f"but got {dim_edges.dim()} dimensions in the bins tensor for dimension {d}. "
                "Give the edges as a sequence."
            )
        if dim_edges.dtype != x.dtype:
            raise RuntimeError(
                "torch.histogramdd: input tensor and bins tensors should have the same dtype, "
                f"but got input with dtype {x.dtype} and bins for dimension {d} with dtype "
                f"{dim_edges.dtype}. Convert the bins."
            )
    _check_counts([len(dim_edges) - 1 for dim_edges in edges], None)


Range = Sequence[float] | None


def _edges_meta(
    x: torch.Tensor, bins: Any, *, range: Range = None, weight: Any = None, density: bool = False
) -> list[torch.Tensor]:
    _check_data(x, weight, len(bins))
    _check_counts(bins, range)
    return [x.new_empty(n + 1) for n in bins]


def _counts_meta(
    x: torch.Tensor, bins: Any, *, range: Range = None, weight: Any = None, density: bool = False
) -> torch.Tensor:
    _edges_meta(x, bins, range=range, weight=weight)
    return x.new_empty(tuple(bins))


def _tensors_meta(
    x: torch.Tensor, bins: Any, *, weight: Any = None, density: bool = False
) -> torch.Tensor:
    _check_data(x, weight, len(bins))
    _check_edges(x, bins)
    return x.new_empty(tuple(len(dim_edges) - 1 for dim_edges in bins))


def _points(
    x: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One-dimensional points of any shape as rows, and their weights in one dim.

    A weight of another shape than the points' stays as it is, for the shape check to reject.
    """
    fits = weight is not None and weight.shape == x.shape
    return x.reshape(-1, 1), weight.reshape(-1) if weight is not None and fits else weight


def _histogram_counts_meta(
    x: torch.Tensor,
    bins: int = 100,
    *,
    range: Range = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    points, weight = _points(x, weight)
    (edges,) = _edges_meta(points, [bins], range=range, weight=weight)
    return points.new_empty(bins), edges


def _histogram_tensor_meta(
    x: torch.Tensor, bins: torch.Tensor, *, weight: Any = None, density: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    points, weight = _points(x, weight)
    return _tensors_meta(points, [bins], weight=weight), bins.new_empty(bins.shape)


# ---- edges and bins ------------------------------------------------------------------------------


def _linspace(low: jax.Array, high: jax.Array, num_bins: int) -> jax.Array:
    """The edges of `num_bins` equal bins, counted from both ends as in torch: both are exact."""
    step = (high - low) / num_bins
    i = np.arange(num_bins + 1)
    return jnp.where(
        i < (num_bins + 1) // 2,
        low + step * i.astype(step.dtype),
        high - step * (num_bins - i).astype(step.dtype),
    )


def _even_edges(points: jax.Array, bins: Sequence[int], range: Range) -> list[jax.Array]:
    """The edges of equal bins over each column's range, which is given or the data's own.

    A range of one value is widened by 1/2 on either side.
    """
    if range is not None:
        bounds = [
            (low - 0.5, high + 0.5) if low == high else (low, high)
            for low, high in zip(range[::2], range[1::2])
        ]
        # By torch's own function, because all numbers are known here: with an edge that is one bit
        # off, a value on that edge would fall into another bin.
        dtype = torch.float64 if points.dtype == np.float64 else torch.float32
        return [
            jnp.asarray(torch.linspace(low, high, n + 1, dtype=dtype).numpy())
            for (low, high), n in zip(bounds, bins)
        ]
    edges = []
    for column, num_bins in zip(points.T, bins):
        if column.size == 0:
            low, high = jnp.zeros((), points.dtype), jnp.ones((), points.dtype)
        else:
            low, high = jnp.min(column), jnp.max(column)
        half = jnp.asarray(0.5, points.dtype)
        low, high = (
            jnp.where(low == high, low - half, low),
            jnp.where(low == high, high + half, high),
        )
        edges.append(_linspace(low, high, num_bins))
    return edges


def _histogram(
    points: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, *, density: bool
) -> jax.Array:
    """The histogram of points (number, dims), given one sequence of edges for each dim."""
    shape = tuple(len(dim_edges) - 1 for dim_edges in edges)
    place, inside = jnp.zeros(points.shape[0], np.int64), jnp.ones(points.shape[0], np.bool_)
    for column, dim_edges, num_bins in zip(points.T, edges, shape):
        inside &= (column >= dim_edges[0]) & (column <= dim_edges[-1])
        found = jnp.searchsorted(dim_edges, column, side="right").astype(np.int64) - 1
        place = place * num_bins + jnp.clip(found, 0, num_bins - 1)
    # Counts are integers until the end: a float32 cannot count beyond 2^24.
    amounts = jnp.ones(points.shape[0], np.int64) if weight is None else weight.reshape(-1)
    total = (
        jnp.zeros(math.prod(shape), amounts.dtype)
        .at[jnp.where(inside, place, math.prod(shape))]
        .add(amounts, mode="drop")
    )
    counts = total.reshape(shape).astype(points.dtype)
    if density:
        counts = counts / jnp.sum(counts)
        for d, dim_edges in enumerate(edges):
            counts = counts / jnp.diff(dim_edges).reshape(-1, *(1,) * (counts.ndim - d - 1))
    finite = jnp.stack(
        [jnp.isfinite(dim_edges[0]) & jnp.isfinite(dim_edges[-1]) for dim_edges in edges]
    ).all()
    return jnp.where(finite, counts, jnp.asarray(jnp.nan, counts.dtype))


@lowering("aten.histogram.bin_ct", meta=_histogram_counts_meta)
def _histogram_bin_ct(
    ctx: Context,
    x: Any,
    bins: int = 100,
    *,
    range: Range = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    points = x.reshape(-1, 1)
    edges = _even_edges(points, [bins], range)
    return _histogram(points, edges, weight, density=density), edges[0]


@lowering("aten.histogram.bins_tensor", meta=_histogram_tensor_meta)
def _histogram_bins_tensor(
    ctx: Context, x: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _histogram(x.reshape(-1, 1), [bins], weight, density=density), bins


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@lowering("aten._histogramdd_bin_edges.default", meta=_edges_meta)
def _histogramdd_bin_edges(
    ctx: Context,
    x: Any,
    bins: Sequence[int],
    *,
    range: Range = None,
    weight: Any = None,
    density: bool = False,
) -> list[jax.Array]:
    return _even_edges(_rows(x), bins, range)


@lowering("aten._histogramdd_from_bin_cts.default", meta=_counts_meta)
def _histogramdd_from_bin_cts(
    ctx: Context,
    x: Any,
    bins: Sequence[int],
    *,
    range: Range = None,
    weight: Any = None,
    density: bool = False,
) -> jax.Array:
    return _histogram(_rows(x), _even_edges(_rows(x), bins, range), weight, density=density)


@lowering("aten._histogramdd_from_bin_tensors.default", meta=_tensors_meta)
def _histogramdd_from_bin_tensors(
    ctx: Context, x: Any, bins: Sequence[Any], *, weight: Any = None, density: bool = False
) -> jax.Array:
    return _histogram(_rows(x), bins, weight, density=density)


@lowering("aten.histc.default")
def _histc(ctx: Context, x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    low, high = as_array(min, x.dtype), as_array(max, x.dtype)
    flat = x.reshape(-1)
    if flat.size:
        # Equal bounds mean the data's own range. If that is one value, it is widened by 1 on either
        # side.
        low, high = (
            jnp.where(low == high, flat.min(), low),
            jnp.where(low == high, flat.max(), high),
        )
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    inside = (flat >= low) & (flat <= high)
    place = jnp.minimum(jnp.floor((flat - low) * bins / (high - low)), bins - 1)
    target = jnp.where(inside, place, bins).astype(np.int64)
    counts = jnp.zeros(bins, np.int64).at[target].add(1, mode="drop").astype(ctx.dtype)
    if not jnp.issubdtype(ctx.dtype, jnp.floating):
        return counts
    return jnp.where(
        jnp.isfinite(low) & jnp.isfinite(high), counts, jnp.asarray(jnp.nan, ctx.dtype)
    )
