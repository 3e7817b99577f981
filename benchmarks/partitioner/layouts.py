"""Does XLA's partitioner keep the values of common calls under every layout of their tensors?

`python -m benchmarks.partitioner` draws few layouts of many operations. This takes the calls that
models are made of, on a mesh of two axes, and goes through the ways in which each axis splits a dim
of each operand and of the result, or none: all of them, or a random part. The gradients of the
operands are compared too. Sizes divide by the mesh, or do not.

Run: python -m benchmarks.partitioner.layouts
         at most 128 layouts of each call (about a quarter of an hour)
     python -m benchmarks.partitioner.layouts --calls 'conv*' --limit 0 --show
         every layout of some calls
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.options import mesh_shape, whole
from benchmarks.partitioner import sweep_options

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = sweep_options.parser_of(__doc__, "benchmarks.partitioner.layouts")
    parser.add_argument(
        "--limit", type=whole(0), default=128, help="layouts of a call; 0: every one (default 128)"
    )
    parser.add_argument(
        "--mesh", type=mesh_shape(2), default="2,2", help="sizes of the two axes (default 2,2)"
    )
    parser.add_argument(
        "--nonfinite", action="store_true", help="the first tensor has a NaN and both infinities"
    )
    args = parser.parse_args()

import torch
from torch.nn import functional as F

import spmd_core as spmd
from benchmarks.partitioner import sweeps
from benchmarks.partitioner.sweeps import Failure, Sweep

Spec: TypeAlias = tuple[Any, ...]
AXES = ("x", "y")
AT_ONCE = 32  # programs in one compilation
TOLERANCE = 1e-9  # of float64
# B, T, D: sizes that the meshes' axes divide, and sizes that they do not.
SIZES = {"even": (8, 4, 12), "uneven": (5, 6, 7)}


@dataclass(frozen=True)
class Call:
    """A call whose layouts are tried.

    Attributes:
        function: of the operands.
        shapes: of the operands, in terms of B, T and D; a pair (n, shape) is of integers below n.
    """

    function: Callable[..., torch.Tensor]
    shapes: Callable[[int, int, int], Sequence[Any]]

    def operands(
        self, size: str | tuple[int, int, int], *, has_nonfinite: bool = False
    ) -> list[torch.Tensor]:
        """Float64 or int64 tensors on the CPU, the same at each call.

        Args:
            size: key of `SIZES`, or B, T and D.
            has_nonfinite: whether the first float64 tensor has a NaN and both infinities.
        """
        generator = torch.Generator().manual_seed(0)
        found = [
            torch.randint(shape[0], shape[1], generator=generator)
            if isinstance(shape[-1], tuple)
            else torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in self.shapes(*(SIZES[size] if isinstance(size, str) else size))
        ]
        first = next((x for x in found if x.is_floating_point()), None)
        if has_nonfinite and first is not None:
            for value, part in ((math.nan, 7), (math.inf, 3), (-math.inf, 2)):
                first.view(-1)[first.numel() // part] = value
        return found


def _write_masked(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    mask = x[:, 0] > 0
    result[mask] += row
    result[~mask] = result[~mask] * row.tanh() + 1
    result[result > 1] *= 2
    return result


def _write_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[1:3] = rows
    result[:, 0] *= 2
    return result


def _rotated_halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((-second, first), -1)


def _heads(x: torch.Tensor) -> torch.Tensor:
    split = x.reshape(x.shape[0], x.shape[1], 3, 2).transpose(1, 2)
    return split.reshape(x.shape[0] * 3, x.shape[1], 2)


def _one(b: int, t: int, d: int) -> Sequence[Any]:
    return [(b, t, d)]


def _matrix(b: int, t: int, d: int) -> Sequence[Any]:
    return [(b, d)]


CALLS: dict[str, Call] = {
    "mm": Call(lambda a, b: a @ b, lambda b, t, d: [(b, d), (d, t)]),
    "bmm": Call(lambda a, b: a @ b, lambda b, t, d: [(b, t, d), (b, d, t)]),
    "baddbmm": Call(
        lambda a, b, c: torch.baddbmm(c, a, b), lambda b, t, d: [(b, t, d), (b, d, t), (t, t)]
    ),
    "linear": Call(F.linear, lambda b, t, d: [(b, t, d), (8, d)]),
    "einsum": Call(
        lambda a, b: torch.einsum("btd,bd->tb", a, b), lambda b, t, d: [(b, t, d), (b, d)]
    ),
    "outer": Call(lambda a, b: a[:, None] * b, lambda b, t, d: [(b,), (d,)]),
    "mv": Call(lambda a, b: a @ b, lambda b, t, d: [(b, d), (d,)]),
    "tensordot": Call(
        lambda a, b: torch.tensordot(a, b, ((1, 2), (1, 0))), lambda b, t, d: [(b, t, d), (d, t, 5)]
    ),
    "conv": Call(lambda a, b: F.conv1d(a, b, padding=1), lambda b, t, d: [(b, t, d), (6, t, 3)]),
    "conv_stride": Call(
        lambda a, b: F.conv1d(a, b, padding=1, stride=2), lambda b, t, d: [(b, t, d), (6, t, 3)]
    ),
    "conv_small": Call(
        lambda a, b: F.conv1d(a, b, padding=1), lambda b, t, d: [(b, t, 2), (6, t, 3)]
    ),
    "conv_few_positions": Call(
        lambda a, b: F.conv1d(a, b, padding=1), lambda b, t, d: [(2, t, d), (2 * d, t, 3)]
    ),
    "conv_transpose": Call(
        lambda a, b: F.conv_transpose1d(a, b, padding=1, stride=2),
        lambda b, t, d: [(b, t, d), (t, 6, 3)],
    ),
    "conv_depthwise": Call(
        lambda a, b: F.conv1d(a, b, padding=1, groups=len(b)),
        lambda b, t, d: [(b, t, d), (t, 1, 3)],
    ),
    "conv_pointwise": Call(F.conv1d, lambda b, t, d: [(b, t, d), (6, t, 1)]),
    "max_pool": Call(lambda a: F.max_pool1d(a, 3, 2, 1), _one),
    "avg_pool": Call(lambda a: F.avg_pool1d(a, 3, 2, 1), _one),
    "adaptive_pool": Call(lambda a: F.adaptive_avg_pool1d(a, 2), _one),
    "interpolate": Call(lambda a: F.interpolate(a, scale_factor=2, mode="linear"), _one),
    "nearest": Call(lambda a: F.interpolate(a, scale_factor=2), _one),
    "embedding": Call(
        lambda ids, table: F.embedding(ids, table), lambda b, t, d: [(d, (b, 3)), (d, t)]
    ),
    "index_select": Call(lambda a, i: a.index_select(1, i), lambda b, t, d: [(b, d, t), (d, (6,))]),
    "index_first": Call(lambda a, i: a[i], lambda b, t, d: [(b, t, d), (b, (6,))]),
    "index_last": Call(lambda a, i: a[..., i], lambda b, t, d: [(b, t, d), (d, (6,))]),
    "index_two": Call(
        lambda a, i, j: a[i, :, j], lambda b, t, d: [(b, t, d), (b, (6,)), (d, (6,))]
    ),
    "gather": Call(lambda a, i: a.gather(1, i), lambda b, t, d: [(b, d), (d, (b, 6))]),
    "scatter_add": Call(
        lambda a, i, c: a.scatter_add(1, i, c), lambda b, t, d: [(b, d), (d, (b, 6)), (b, 6)]
    ),
    "index_add": Call(
        lambda a, i, c: a.index_add(0, i, c), lambda b, t, d: [(b, d), (b, (6,)), (6, d)]
    ),
    "index_put": Call(
        lambda a, i, c: a.index_put((i,), c, accumulate=True),
        lambda b, t, d: [(b, d), (b, (6,)), (6, d)],
    ),
    "write_rows": Call(_write_rows, lambda b, t, d: [(b, t, d), (2, t, d)]),
    "slice_scatter": Call(
        lambda a, b: a.slice_scatter(b, 1, 1, 3), lambda b, t, d: [(b, 6, d), (b, 2, d)]
    ),
    "cat": Call(lambda a, b: torch.cat([a, b], 1), lambda b, t, d: [(b, d), (b, 6)]),
    "stack": Call(lambda a, b: torch.stack([a, b], 1), lambda b, t, d: [(b, d), (b, d)]),
    "masked writes": Call(_write_masked, lambda b, t, d: [(b * t, d), (d,)]),
    "where": Call(lambda a, b: torch.where(a > b, a, b * 2), lambda b, t, d: [(b, t, d), (t, d)]),
    "broadcast": Call(lambda a, b: a * b, lambda b, t, d: [(b, t, d), (t, 1)]),
    "split": Call(lambda a: a.split(3, -1)[0] * a.split(3, -1)[1], _one),
    "slice": Call(lambda a: a[1:, :, ::2], _one),
    "slice_inner": Call(lambda a: a[:, 1:-1, 2:5], _one),
    "select": Call(lambda a: a[..., 2], _one),
    "flip": Call(lambda a: a.flip(0, 2), _one),
    "roll": Call(lambda a: a.roll((1, 2), (0, 2)), _one),
    "pad": Call(lambda a: F.pad(a, (1, 2, 0, 1)), _one),
    "reflect": Call(lambda a: F.pad(a, (1, 2), mode="reflect"), _one),
    "circular": Call(lambda a: F.pad(a, (1, 2), mode="circular"), _one),
    "rotated_halves": Call(_rotated_halves, _one),
    "cumsum": Call(lambda a: a.cumsum(1), _one),
    "cumprod": Call(lambda a: a.cumprod(0), _one),
    "sort": Call(lambda a: a.sort(-1)[0], _one),
    "topk": Call(lambda a: a.topk(3, -1)[0], _one),
    "softmax": Call(lambda a: a.softmax(-1), _one),
    "logsumexp": Call(lambda a: a.logsumexp(1), _one),
    "layer_norm": Call(lambda a: F.layer_norm(a, a.shape[-1:]), _one),
    "rms_norm": Call(
        lambda a, w: F.rms_norm(a, a.shape[-1:], w), lambda b, t, d: [(b, t, d), (d,)]
    ),
    "group_norm": Call(lambda a: F.group_norm(a, 2), _one),
    "batch_norm": Call(
        lambda a, w: F.batch_norm(a, None, None, w, training=True),
        lambda b, t, d: [(b, t, d), (t,)],
    ),
    "attention": Call(F.scaled_dot_product_attention, lambda b, t, d: [(b, t, 6, 4)] * 3),
    "causal_attention": Call(
        lambda q: F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True),
        lambda b, t, d: [(b, t, 6, 4)],
    ),
    "cross_entropy": Call(F.cross_entropy, lambda b, t, d: [(b, d), (d, (b,))]),
    "cross_entropy_of_positions": Call(
        lambda a, i: F.cross_entropy(a, i, reduction="none"),
        lambda b, t, d: [(b, d, t), (d, (b, t))],
    ),
    "merge_dims": Call(lambda a: a.reshape(a.shape[0] * a.shape[1], -1), _one),
    "merge_last_dims": Call(lambda a: a.reshape(a.shape[0], -1), _one),
    "flatten": Call(lambda a: a.reshape(-1), _one),
    "split_dim": Call(lambda a: a.reshape(a.shape[0], 2, 3, -1), lambda b, t, d: [(b, 6, d)]),
    "heads": Call(_heads, lambda b, t, d: [(b, t, 6)]),
    "permute": Call(lambda a: a.permute(2, 0, 1), _one),
    "expand": Call(lambda a: a[:, None].expand(-1, 3, -1), _matrix),
    "repeat": Call(lambda a: a.repeat(2, 3), _matrix),
    "repeat_interleave": Call(lambda a: a.repeat_interleave(2, 0), _matrix),
    "unfold": Call(lambda a: a.unfold(2, 3, 2), _one),
    "diagonal": Call(lambda a: a.diagonal(0, 1, 2), _one),
    "diag_embed": Call(torch.diag_embed, _matrix),
    "tril": Call(torch.tril, _one),
    "var": Call(lambda a: a.var(1), _one),
    "sum": Call(lambda a: a.sum((0, 2)), _one),
    "mean": Call(torch.mean, _one),
    "amax": Call(lambda a: a.amax(1), _one),
    "median": Call(lambda a: a.median(1)[0], _one),
    "prod": Call(lambda a: a.prod(1), _one),
    "norm": Call(lambda a: a.norm(dim=-1), _one),
    "cdist": Call(torch.cdist, lambda b, t, d: [(b, t, 3), (b, 6, 3)]),
    "kron": Call(torch.kron, lambda b, t, d: [(b, t), (3, d)]),
    "pixel_shuffle": Call(lambda a: F.pixel_shuffle(a, 2), lambda b, t, d: [(2, 4, t, d)]),
    "glu": Call(lambda a: F.glu(a, 1), lambda b, t, d: [(b, 6, d)]),
}


def specs(ndim: int, axes: Sequence[str] = AXES) -> Iterator[Spec]:
    """Every partition spec of a tensor over these axes; one dim may get several, in their order."""
    for dims in itertools.product((None, *range(ndim)), repeat=len(axes)):
        by_dim = [tuple(a for a, of in zip(axes, dims) if of == dim) for dim in range(ndim)]
        yield tuple(found if len(found) > 1 else found[0] if found else None for found in by_dim)


def layouts(ndims: Sequence[int], limit: int, axes: Sequence[str] = AXES) -> list[tuple[Spec, ...]]:
    """The layouts of tensors, at most `limit` of them (0: all), those of one kind side by side.

    What a program splits decides how it is lowered, so the programs of one compilation split the
    same dims.
    """
    found = list(itertools.product(*(list(specs(ndim, axes)) for ndim in ndims)))
    if limit and len(found) > limit:
        found = random.Random(0).sample(found, limit)
    return sorted(found, key=lambda layout: sorted(_split_dims(layout)))


def _split_dims(layout: Sequence[Spec]) -> set[int]:
    return {d - len(spec) for spec in layout for d, axes in enumerate(spec) if axes is not None}


def evaluate(
    call: Call,
    operands: Sequence[torch.Tensor],
    device: str,
    mesh: spmd.Mesh | None = None,
    layout: Sequence[Spec] = (),
) -> list[torch.Tensor]:
    """The result and the gradients of the operands, each read and made by another operation."""

    def marked(tensor: torch.Tensor, spec: Spec | None) -> torch.Tensor:
        if mesh is not None and spec is not None and any(axes is not None for axes in spec):
            spmd.mark_sharding(tensor, mesh, spec)
        return tensor

    marks: Sequence[Spec | None] = layout or [None] * (len(operands) + 1)
    leaves = [x.to(device).requires_grad_(x.is_floating_point()) for x in operands]
    result = call.function(*(marked(x * 1, spec) for x, spec in zip(leaves, marks))) * 1
    marked(result, marks[-1])
    weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    # The sine of an infinity is NaN: all gradients would be.
    has_nonfinite = not all(x.isfinite().all() for x in operands)
    ((result if has_nonfinite else result.sin()) * weight.to(device)).sum().backward()
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _error(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference; NaN where one alone is NaN or an infinity of that sign."""
    same = (got == right) | (got.isnan() & right.isnan())
    return float((got - right).abs().where(~same, 0.0).max()) if right.numel() else 0.0


def failures(
    call: Call,
    size: str,
    mesh: spmd.Mesh,
    tried: Sequence[tuple[Spec, ...]],
    *,
    has_nonfinite: bool = False,
) -> Iterator[Failure]:
    """The layouts that raise, or under which a value is not that of eager torch."""
    operands = call.operands(size, has_nonfinite=has_nonfinite)
    expected = evaluate(call, [x.clone() for x in operands], "cpu")

    def run(batch: Sequence[tuple[Spec, ...]]) -> list[list[torch.Tensor]]:
        found = [evaluate(call, operands, "xla", mesh, layout) for layout in batch]
        spmd.sync()
        return [[x.cpu() for x in tensors] for tensors in found]

    def difference(layout: tuple[Spec, ...], values: Sequence[torch.Tensor]) -> str:
        errors = [_error(got, right) for got, right in zip(values, expected, strict=True)]
        is_right = all(error <= TOLERANCE for error in errors)  # false for NaN too
        return "" if is_right else f"errors {', '.join(f'{error:.1e}' for error in errors)}"

    for first in range(0, len(tried), AT_ONCE):
        yield from sweeps.failures(tried[first : first + AT_ONCE], run, difference)


def mesh_of(sizes: str) -> spmd.Mesh:
    """The mesh of one or two axes of these sizes, joined by a comma."""
    shape = tuple(map(int, sizes.split(",")))
    return spmd.Mesh(range(math.prod(shape)), shape, AXES[: len(shape)])


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    call, mesh = CALLS[task["call"]], mesh_of(task["mesh"])
    operands = call.operands(task["sizes"])
    ndims = [*(x.dim() for x in operands), call.function(*operands).dim()]
    tried = layouts(ndims, task["limit"])
    found = failures(call, task["sizes"], mesh, tried, has_nonfinite=task["nonfinite"])
    return sweeps.answer_of(len(tried), found)


def _tasks(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    more = {name: getattr(args, name) for name in ("mesh", "limit", "nonfinite")}
    return [{"call": name, "sizes": size, **more} for name, size in itertools.product(names, SIZES)]


SWEEP = Sweep(
    "benchmarks.partitioner.layouts",
    "partitioner_layouts",
    [*CALLS],
    ("call", "sizes"),
    _tasks,
    _answer,
    lambda total, args: (
        f"{total:,} layouts of common calls on a mesh of {args.mesh}, against eager torch"
    ),
)

if __name__ == "__main__":
    sys.exit(SWEEP.main(args))
