"""Are values and gradients right where tensors of one program are marked over different axes?

`layouts.py` marks the operands of one call, each made by another operation. This writes programs as
a training step is written, for what looks up, scatters and sums. Parameters are leaves that require
gradients and have marks, so that a gradient is marked too, and reduced over the devices to where
its parameter lies. The data is marked, and at least two tensors over different axes. Of the sizes
B, T and D one does not divide by the axes, or none.

Programs that split the data alike are compiled together: how data is split decides how gradients
are reduced. A program is drawn from the numbers that its failure names.

Run: python -m benchmarks.partitioner.pairs
         every call on every mesh (about half an hour)
     python -m benchmarks.partitioner.pairs --calls 'embedding*,tied' --first 4 --groups 20 --show
         other and more programs of some calls
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.options import check_names, whole
from benchmarks.partitioner import sweep_options

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = sweep_options.parser_of(__doc__, "benchmarks.partitioner.pairs")
    parser.add_argument(
        "--mesh", action="append", help="name of a mesh, such as 4x2 (default: every one)"
    )
    parser.add_argument(
        "--groups", type=whole(), default=4, help="groups of a call on a mesh (default 4)"
    )
    parser.add_argument(
        "--first", type=whole(0), default=0, help="number of the first one (default 0)"
    )
    args = parser.parse_args()

import torch
from torch.nn import functional as F

import spmd_core as spmd
from benchmarks.partitioner import sweeps
from benchmarks.partitioner.layouts import Call, Spec, specs
from benchmarks.partitioner.sweeps import Failure, Sweep

MESHES = {"4x2": (4, 2), "2x4": (2, 4), "2x2x2": (2, 2, 2), "8": (8,)}
AXES = ("x", "y", "z")
# B, T, D: all divide by the axes of each mesh, or one of them by none or few. The last one is less
# than the number of devices along an axis.
SIZES = {
    "even": (8, 8, 16),
    "uneven B": (7, 8, 16),
    "uneven T": (8, 5, 16),
    "uneven D": (8, 8, 13),
    "small D": (8, 8, 3),
}
AT_ONCE = 6  # programs in one compilation
TOLERANCE = 1e-9  # of float64, in terms of the largest element
# Eager torch rounds to bfloat16 in other places: this finds misplaced and missing terms alone.
AUTOCAST_TOLERANCE = 0.06


class Variant(Enum):
    """How a program is run."""

    ONCE = "once"
    ACCUMULATED = "with gradients of two runs"
    AUTOCAST = "under autocast"


def _tied(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.linear(F.embedding(ids, table).sin(), table)


def _positions(ids: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(ids.shape[1], device=ids.device)
    return (F.embedding(ids, table) + F.embedding(numbers, positions)).sin()


def _mlp(ids: torch.Tensor, table: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(F.embedding(ids, table).sin(), w, b)


def _head(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w, bias).flatten(0, 1), ids.flatten())


def _linear_cross_entropy(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, targets = x.flatten(0, 1), ids.flatten()
    if x.device.type == "cpu":
        return F.cross_entropy(F.linear(rows, w), targets)
    return spmd.linear_cross_entropy(rows, w, targets)


def _segment_sums(x: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (x * scale).new_zeros(len(scale), *x.shape[1:]).index_add(0, ids, x * scale)


def _bag(mode: str) -> Callable[..., torch.Tensor]:
    return lambda ids, table: F.embedding_bag(ids, table, mode=mode)


def _ragged_bag(ids: torch.Tensor, table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 1, 1, 4], device=ids.device)
    return F.embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights)


CALLS: dict[str, Call] = {
    "embedding": Call(F.embedding, lambda b, t, d: [(d, (b, t)), (d, t)]),
    "embedding_of_rows": Call(F.embedding, lambda b, t, d: [(d, (b,)), (d, t)]),
    "embedding_of_many_rows": Call(F.embedding, lambda b, t, d: [(d + 80, (b, 2)), (d + 80, t)]),
    "embedding_padding": Call(
        lambda ids, table: F.embedding(ids, table, padding_idx=1),
        lambda b, t, d: [(d, (b, t)), (d, t)],
    ),
    "embedding_max_norm": Call(
        lambda ids, table: F.embedding(ids, table, max_norm=0.5),
        lambda b, t, d: [(d, (b, t)), (d, t)],
    ),
    "embedding_by_frequency": Call(
        lambda ids, table: F.embedding(ids, table, scale_grad_by_freq=True),
        lambda b, t, d: [(d, (b, t)), (d, t)],
    ),
    "tied": Call(_tied, lambda b, t, d: [(d, (b, t)), (d, t)]),
    "positions": Call(_positions, lambda b, t, d: [(d, (b, t)), (d, d), (t, d)]),
    "embedding_linear": Call(_mlp, lambda b, t, d: [(d, (b, 3)), (d, t), (d, t), (d,)]),
    "bag_sum": Call(_bag("sum"), lambda b, t, d: [(d, (b, t)), (d, t)]),
    "bag_mean": Call(_bag("mean"), lambda b, t, d: [(d, (b, t)), (d, t)]),
    "bag_max": Call(_bag("max"), lambda b, t, d: [(d, (b, t)), (d, t)]),
    "bag_ragged": Call(_ragged_bag, lambda b, t, d: [(d, (b,)), (d, t), (b,)]),
    "index_select": Call(
        lambda ids, a: a.index_select(0, ids), lambda b, t, d: [(d, (b,)), (d, t)]
    ),
    "index_select_columns": Call(
        lambda ids, a: a.index_select(1, ids), lambda b, t, d: [(d, (b,)), (t, d)]
    ),
    "index": Call(lambda ids, a: a[ids], lambda b, t, d: [(d, (b, t)), (d, t)]),
    "index_two": Call(lambda i, j, a: a[i, j], lambda b, t, d: [(d, (b,)), (t, (b,)), (d, t, 4)]),
    "index_last": Call(lambda ids, a: a[..., ids], lambda b, t, d: [(d, (b,)), (t, d)]),
    "gather": Call(lambda ids, a: a.gather(0, ids), lambda b, t, d: [(d, (b, t)), (d, t)]),
    "gather_columns": Call(lambda ids, a: a.gather(1, ids), lambda b, t, d: [(d, (b, t)), (b, d)]),
    "take": Call(lambda ids, a: a.take(ids), lambda b, t, d: [(d * t, (b, 3)), (d, t)]),
    "take_along_dim": Call(
        lambda ids, a: a.take_along_dim(ids, 0), lambda b, t, d: [(d, (b, t)), (d, t)]
    ),
    "scatter": Call(
        lambda ids, a, c: a.scatter(1, ids.sort(1)[0] * 0 + torch.arange(2, device=ids.device), c),
        lambda b, t, d: [(d, (b, 2)), (b, d), (b, 2)],
    ),
    "scatter_add": Call(
        lambda ids, a, c: a.scatter_add(0, ids, c), lambda b, t, d: [(d, (b, t)), (d, t), (b, t)]
    ),
    "scatter_add_columns": Call(
        lambda ids, a, c: a.scatter_add(1, ids, c), lambda b, t, d: [(d, (b, t)), (b, d), (b, t)]
    ),
    "scatter_reduce": Call(
        lambda ids, a, c: a.scatter_reduce(0, ids, c, "mean"),
        lambda b, t, d: [(d, (b, t)), (d, t), (b, t)],
    ),
    "index_add": Call(
        lambda ids, a, c: a.index_add(0, ids, c), lambda b, t, d: [(d, (b,)), (d, t), (b, t)]
    ),
    "index_put": Call(
        lambda ids, a, c: a.index_put((ids,), c, accumulate=True),
        lambda b, t, d: [(d, (b,)), (d, t), (b, t)],
    ),
    "index_put_batches": Call(
        lambda ids, a, c: a.index_put((ids,), c, accumulate=True),
        lambda b, t, d: [(d, (b, t)), (d, 4), (b, t, 4)],
    ),
    "index_reduce": Call(
        lambda ids, a, c: a.index_reduce(0, ids, c, "amax"),
        lambda b, t, d: [(d, (b,)), (d, t), (b, t)],
    ),
    "put": Call(
        lambda ids, a, c: a.put(ids, c, accumulate=True),
        lambda b, t, d: [(d * t, (b,)), (d, t), (b,)],
    ),
    "segment_sums": Call(_segment_sums, lambda b, t, d: [(b, t, 4), (b, 1, 1), (b, (b,))]),
    "one_hot": Call(
        lambda ids, a: F.one_hot(ids, len(a)).to(a.dtype) @ a,
        lambda b, t, d: [(d, (b, t)), (d, t)],
    ),
    "cross_entropy": Call(
        lambda ids, a: F.cross_entropy(a, ids), lambda b, t, d: [(d, (b,)), (b, d)]
    ),
    "cross_entropy_of_positions": Call(
        lambda ids, a: F.cross_entropy(a, ids), lambda b, t, d: [(d, (b, t)), (b, d, t)]
    ),
    "cross_entropy_weighted": Call(
        lambda ids, a, w: F.cross_entropy(a, ids, w.detach().abs(), label_smoothing=0.1),
        lambda b, t, d: [(d, (b,)), (b, d), (d,)],
    ),
    "nll_loss": Call(
        lambda ids, a: F.nll_loss(a, ids, ignore_index=1), lambda b, t, d: [(d, (b,)), (b, d)]
    ),
    "head": Call(_head, lambda b, t, d: [(b, t, 4), (d, 4), (d,), (d, (b, t))]),
    "linear_cross_entropy": Call(
        _linear_cross_entropy, lambda b, t, d: [(b, t, 4), (d, 4), (d, (b, t))]
    ),
    "linear": Call(F.linear, lambda b, t, d: [(b, t, d), (t, d), (t,)]),
    "mm": Call(lambda x, w: x.flatten(0, 1) @ w, lambda b, t, d: [(b, t, d), (d, t)]),
    "einsum": Call(
        lambda x, w: torch.einsum("btd,td->bd", x, w), lambda b, t, d: [(b, t, d), (t, d)]
    ),
    "scale_and_shift": Call(
        lambda x, w, bias: x * w + bias, lambda b, t, d: [(b, t, d), (d,), (t, d)]
    ),
    "sum": Call(lambda x, w: (x * w).sum(0), lambda b, t, d: [(b, t, d), (t, 1)]),
    "sum_of_rows": Call(lambda x, w: x.sum((0, 2)) * w, lambda b, t, d: [(b, t, d), (t,)]),
    "layer_norm": Call(
        lambda x, w, bias: F.layer_norm(x, w.shape, w, bias),
        lambda b, t, d: [(b, t, d), (d,), (d,)],
    ),
    "rms_norm": Call(lambda x, w: F.rms_norm(x, w.shape, w), lambda b, t, d: [(b, t, d), (d,)]),
    "batch_norm": Call(
        lambda x, w, bias: F.batch_norm(x, None, None, w, bias, training=True),
        lambda b, t, d: [(b, t, d), (t,), (t,)],
    ),
    "conv": Call(
        lambda x, w, bias: F.conv1d(x, w, bias, padding=1),
        lambda b, t, d: [(b, t, d), (4, t, 3), (4,)],
    ),
    "cumsum": Call(lambda x, w: (x * w).cumsum(0), lambda b, t, d: [(b, t, d), (t, d)]),
    "cumsum_of_positions": Call(
        lambda x, w: (x * w).cumsum(1), lambda b, t, d: [(b, t, d), (t, d)]
    ),
    "logcumsumexp": Call(lambda x, w: (x * w).logcumsumexp(1), lambda b, t, d: [(b, t, d), (t, d)]),
    "softmax": Call(lambda x, w: (x @ w).softmax(-1), lambda b, t, d: [(b, t, d), (d, t)]),
}


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        size: key of `SIZES`.
        marks: the partition spec of each operand, and of the result, or None for no mark.
        variant: how it is run.
    """

    size: str
    marks: tuple[Spec | None, ...]
    variant: Variant

    def __str__(self) -> str:
        return f"{self.size}, marks {', '.join(map(str, self.marks))}, {self.variant.value}"


def axes_of(spec: Spec | None) -> frozenset[str]:
    """The axes that a partition spec uses."""
    names: set[str] = set()
    for axes in spec or ():
        names.update(axes if isinstance(axes, tuple) else [axes] if axes else [])
    return frozenset(names)


def is_pair(marks: Sequence[Spec | None], num_axes: int) -> bool:
    """Whether two tensors are marked over different axes; of a mesh of one axis, whether two are.

    Args:
        marks: of the operands.
        num_axes: of the mesh.
    """
    used = [axes for axes in map(axes_of, marks) if axes]
    return len(used) > 1 if num_axes == 1 else len(set(used)) > 1


def draw(name: str, mesh: str, number: int) -> list[Program]:
    """The group of programs with this number, which split the data and the result alike."""
    rng = random.Random(f"{name} {mesh} {number}")
    axes = AXES[: len(MESHES[mesh])]
    call, size = CALLS[name], rng.choice([*SIZES])
    operands = call.operands(SIZES[size])
    result = rng.choice([*specs(call.function(*operands).dim(), axes)])
    marks: list[Spec | None] = [*(None for _ in operands), result if rng.random() < 0.3 else None]
    is_data = [not x.is_floating_point() or x.dim() > 2 for x in operands]
    for i, x in enumerate(operands):
        if is_data[i]:
            marks[i] = rng.choice([*specs(x.dim(), axes)][1:])  # the first one splits nothing
    programs: dict[Program, None] = {}
    for _ in range(20 * AT_ONCE):
        for i, x in enumerate(operands):
            if not is_data[i]:
                marks[i] = rng.choice([*specs(x.dim(), axes)])
        if is_pair(marks[:-1], len(axes)):
            programs[Program(size, tuple(marks), rng.choice([*Variant]))] = None
        if len(programs) == AT_ONCE:
            break
    return [*programs]


def evaluate(
    call: Call, program: Program, device: str, mesh: spmd.Mesh | None = None
) -> list[torch.Tensor]:
    """The result, the operands afterwards, and the gradients of those that have one."""
    dtype = torch.float32 if program.variant is Variant.AUTOCAST else torch.float64
    operands = call.operands(SIZES[program.size])
    *marks, of_result = program.marks

    def marked(tensor: torch.Tensor, spec: Spec | None) -> torch.Tensor:
        if mesh is not None and axes_of(spec):
            assert spec is not None
            spmd.mark_sharding(tensor, mesh, spec)
        return tensor

    leaves = []
    for x, spec in zip(operands, marks):
        x = x.to(dtype) if x.is_floating_point() else x
        leaves.append(marked(x.to(device).requires_grad_(x.is_floating_point()), spec))
    for _ in range(2 if program.variant is Variant.ACCUMULATED else 1):
        with torch.autocast(device, torch.bfloat16, enabled=program.variant is Variant.AUTOCAST):
            result = marked(call.function(*leaves), of_result)
        weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
        (result.to(torch.float64).sin() * weight.to(device)).sum().backward()
    gradients = [x.grad for x in leaves if x.grad is not None]
    return [x.detach() for x in (result, *leaves, *gradients)]


def _difference(got: torch.Tensor, right: torch.Tensor, variant: Variant) -> str:
    """How a tensor differs from eager torch's; empty if it does not."""
    # Which operations autocast keeps in float32 depends on the type of the device.
    has_dtype = got.dtype == right.dtype or variant is Variant.AUTOCAST
    if got.shape != right.shape or not has_dtype:
        return f"{got.dtype}{[*got.shape]} instead of {right.dtype}{[*right.shape]}"
    if not right.numel():
        return ""
    got, right = got.to(torch.float64), right.to(torch.float64)
    error, largest = (got - right).abs().max().item(), right.abs().max().item()
    tolerance = AUTOCAST_TOLERANCE if variant is Variant.AUTOCAST else TOLERANCE
    return "" if error <= tolerance * max(largest, 1) else f"an error of {error:.1e}"


def failures(call: Call, programs: Sequence[Program], mesh: spmd.Mesh) -> Iterator[Failure]:
    """The programs that raise, or whose values are not those of eager torch."""
    right = {p: evaluate(call, p, "cpu") for p in programs}

    def run(some: Sequence[Program]) -> list[list[torch.Tensor]]:
        found = [evaluate(call, p, "xla", mesh) for p in some]
        spmd.sync()
        return [[x.cpu() for x in tensors] for tensors in found]

    def difference(program: Program, found: Sequence[torch.Tensor]) -> str:
        pairs = zip(found, right[program], strict=True)
        texts = [_difference(x, y, program.variant) for x, y in pairs]
        return "; ".join(text or "right" for text in texts) if any(texts) else ""

    yield from sweeps.failures(programs, run, difference)


def mesh_of(name: str) -> spmd.Mesh:
    """The mesh with this key in `MESHES`, over eight devices."""
    return spmd.Mesh(range(8), MESHES[name], AXES[: len(MESHES[name])])


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    name, mesh = task["call"], task["mesh"]
    programs = draw(name, mesh, task["group"])
    return sweeps.answer_of(len(programs), failures(CALLS[name], programs, mesh_of(mesh)))


def _tasks(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    check_names("--mesh", args.mesh or (), MESHES)
    groups = range(args.first, args.first + args.groups)
    return [
        {"call": name, "mesh": mesh, "group": group}
        for group, name, mesh in itertools.product(groups, names, args.mesh or MESHES)
    ]


SWEEP = Sweep(
    "benchmarks.partitioner.pairs",
    "partitioner_pairs",
    [*CALLS],
    ("call",),
    _tasks,
    _answer,
    lambda total, args: (
        f"{total:,} programs with tensors marked over different axes, forward and backward, "
        "against eager torch"
    ),
)

if __name__ == "__main__":
    sys.exit(SWEEP.main(args))
