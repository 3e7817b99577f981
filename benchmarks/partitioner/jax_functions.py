"""Do users' jax functions keep their values under every layout of their tensors?

Each function of `jax_calls/` is called by `spmd.call_jax` on tensors that are split over a mesh
of one or two axes, or not, and compared with the same function of jax alone, on one device. Also
compared are the gradients. An operand is computed in the same program, in several ways. Sizes
divide by the mesh, or do not. Worker processes run them, several layouts in one compilation.

Run: python -m benchmarks.partitioner.jax_functions
         at most 24 layouts of each function and mesh (about half an hour on two cores)
     python -m benchmarks.partitioner.jax_functions --calls 'dynamic*' --limit 0 --show
         every layout of some functions
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.options import mesh_shape, whole
from benchmarks.partitioner import sweep_options

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = sweep_options.parser_of(__doc__, "benchmarks.partitioner.jax_functions")
    parser.add_argument(
        "--limit", type=whole(0), default=24, help="layouts of a call on a mesh; 0: every one"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_shape(1, 2),
        action="append",
        help="sizes of one or two axes (default: 2,2 and 8)",
    )
    args = parser.parse_args()

import jax
import jax.numpy as jnp
import numpy as np
import torch

import spmd_core as spmd
from benchmarks.partitioner import sweeps
from benchmarks.partitioner.jax_calls import CALLS
from benchmarks.partitioner.jax_calls.call import SIZES, JaxCall
from benchmarks.partitioner.layouts import AXES, Spec, layouts, mesh_of
from benchmarks.partitioner.sweeps import Failure, Sweep

AT_ONCE = 12  # programs in one compilation
MESHES = ("2,2", "8")
# Where an operand comes from: partitioning depends on what computes it.
SOURCES = ("product", "slice", "roll")


def _weight(shape: Sequence[int]) -> np.ndarray:
    return np.linspace(-1, 1, math.prod(shape)).reshape(shape)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.floating))


def expected(call: JaxCall, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results, and the gradients of float64 operands, by jax alone on one device."""
    floats = [i for i, x in enumerate(arrays) if _is_float(x)]

    def total(given: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        operands: list[Any] = list(map(jnp.asarray, arrays))
        for i, x in zip(floats, given):
            operands[i] = x
        results = [jnp.asarray(x) for x in jax.tree.leaves(call.function(*operands))]
        sums = [(jnp.sin(x) * _weight(x.shape)).sum() for x in results if _is_float(x)]
        return sum(sums, jnp.zeros(())), results

    with jax.enable_x64(True):
        given = [arrays[i] for i in floats]
        if not (call.has_gradient and floats):
            return [np.asarray(x) for x in jax.jit(total)(given)[1]]
        gradients, results = jax.jit(jax.grad(total, has_aux=True))(given)
        return [np.asarray(x) for x in (*results, *gradients)]


def _from(x: torch.Tensor, source: str) -> torch.Tensor:
    """A computed tensor equal to `x`."""
    if source == "slice":
        return torch.cat([x, x])[: len(x)].clone()
    return x.roll(1, 0).roll(-1, 0) if source == "roll" else x * 1


def evaluate(
    call: JaxCall,
    arrays: Sequence[np.ndarray],
    mesh: spmd.Mesh,
    layout: Sequence[Spec],
    source: str,
) -> list[torch.Tensor]:
    """The results and the gradients of operands under that layout, of the first result too."""

    def marked(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        if any(axes is not None for axes in spec):
            spmd.mark_sharding(tensor, mesh, spec)
        return tensor

    leaves = [
        torch.from_numpy(x).to("xla").requires_grad_(call.has_gradient and _is_float(x))
        for x in arrays
    ]
    operands = [marked(_from(x, source), spec) for x, spec in zip(leaves, layout)]
    with jax.enable_x64(True):
        results: Any = spmd.call_jax(call.function, *operands)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    results = list(jax.tree.leaves(results))
    results[0] = marked(results[0] * 1, layout[-1])
    made = [x.detach() for x in results]
    if call.has_gradient and any(x.requires_grad for x in leaves):
        torch.stack(
            [
                (x.sin() * torch.from_numpy(_weight(x.shape)).to("xla")).sum()
                for x in results
                if x.is_floating_point()
            ]
        ).sum().backward()
        made += [x.grad for x in leaves if x.requires_grad]
    return made


def _error(got: torch.Tensor, right: np.ndarray) -> float:
    """The largest difference, relative beyond 1; NaN where one alone is NaN or an infinity."""
    x, y = got.numpy(), right
    if x.dtype != y.dtype or x.shape != y.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        difference = np.abs(x.astype(np.float64) - y) / np.maximum(np.abs(y), 1)
    return float(np.where(same, 0, difference).max(initial=0))


@dataclass(frozen=True)
class _Program:
    """A layout of the operands and of the first result, and where the operands come from."""

    layout: tuple[Spec, ...]
    source: str

    def __str__(self) -> str:
        return f"{self.layout}, {self.source}"


def failures(
    call: JaxCall, size: str, mesh: spmd.Mesh, tried: Sequence[tuple[Spec, ...]]
) -> Iterator[Failure]:
    """The layouts that raise, or under which a value is not jax's own."""
    arrays = call.arrays(size)
    right = expected(call, arrays)
    programs = [_Program(layout, SOURCES[i % len(SOURCES)]) for i, layout in enumerate(tried)]

    def run(batch: Sequence[_Program]) -> list[list[torch.Tensor]]:
        found = [evaluate(call, arrays, mesh, p.layout, p.source) for p in batch]
        spmd.sync()
        return [[x.cpu() for x in tensors] for tensors in found]

    def difference(program: _Program, values: Sequence[torch.Tensor]) -> str:
        errors = [_error(x, y) for x, y in zip(values, right, strict=True)]
        is_right = all(error <= call.tolerance for error in errors)  # false for NaN too
        return "" if is_right else ", ".join(f"{error:.1e}" for error in errors)

    for first in range(0, len(programs), AT_ONCE):
        yield from sweeps.failures(programs[first : first + AT_ONCE], run, difference)


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    call, mesh = CALLS[task["call"]], mesh_of(task["mesh"])
    arrays = call.arrays(task["sizes"])
    with jax.enable_x64(True):
        first = jax.tree.leaves(jax.eval_shape(call.function, *arrays))[0]
    ndims = [*(x.ndim for x in arrays), len(first.shape)]
    tried = layouts(ndims, task["limit"], axes=AXES[: len(mesh.mesh_shape)])
    return sweeps.answer_of(len(tried), failures(call, task["sizes"], mesh, tried))


def _tasks(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every function under one mesh and size, then under the next: a run may be interrupted."""
    return [
        {"call": name, "mesh": mesh, "sizes": size, "limit": args.limit}
        for mesh, size, name in itertools.product(args.mesh or MESHES, reversed(SIZES), names)
    ]


SWEEP = Sweep(
    "benchmarks.partitioner.jax_functions",
    "partitioner_jax",
    [*CALLS],
    ("call",),
    _tasks,
    _answer,
    lambda total, args: (
        f"{total:,} layouts of jax functions called by call_jax, against jax on one device"
    ),
)

if __name__ == "__main__":
    sys.exit(SWEEP.main(args))
