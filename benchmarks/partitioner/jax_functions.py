"""Do users' jax functions keep their values under every layout of their tensors?

Each function of `jax_calls.py` is called by `spmd.call_jax` on tensors that are split over a mesh
of one or two axes, or not, and compared with the same function of jax alone, on one device. Also
compared are the gradients. An operand is computed in the same program, in several ways. Sizes
divide by the mesh, or do not. Worker processes run them, several layouts in one compilation.

Run: python -m benchmarks.partitioner.jax_functions
         at most 24 layouts of each function and mesh (about half an hour on two cores)
     python -m benchmarks.partitioner.jax_functions --calls 'dynamic*' --limit 0 --show
         every layout of some functions
"""

import argparse
import fnmatch
import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--calls", default="*", help="patterns, joined by commas (default all)")
    parser.add_argument(
        "--limit", type=int, default=24, help="layouts of a call on a mesh; 0: every one"
    )
    parser.add_argument(
        "--mesh", action="append", help="sizes of one or two axes (default: 2,2 and 8)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="limit in seconds of a function on a mesh"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--show", action="store_true", help="print the table, write no files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

import jax
import jax.numpy as jnp
import numpy as np
import torch

import spmd_core as spmd
from benchmarks import workers
from benchmarks.partitioner.jax_calls import CALLS, SIZES, JaxCall
from benchmarks.partitioner.layouts import AXES, Spec, layouts
from benchmarks.partitioner.programs import start

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
    x, y = got.cpu().numpy(), right
    if x.dtype != y.dtype or x.shape != y.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        difference = np.abs(x.astype(np.float64) - y) / np.maximum(np.abs(y), 1)
    return float(np.where(same, 0, difference).max(initial=0))


def failures(
    call: JaxCall, size: str, mesh: spmd.Mesh, tried: Sequence[tuple[Spec, ...]]
) -> Iterator[tuple[str, str]]:
    """("wrong" or "error", a line) for each layout under which a value is not jax's own."""
    arrays = call.arrays(size)
    right = expected(call, arrays)
    named = [(layout, SOURCES[i % len(SOURCES)]) for i, layout in enumerate(tried)]

    def run(batch: Sequence[tuple[tuple[Spec, ...], str]]) -> list[list[float]]:
        found = [evaluate(call, arrays, mesh, layout, source) for layout, source in batch]
        spmd.sync()
        return [[_error(x, y) for x, y in zip(xs, right, strict=True)] for xs in found]

    for first in range(0, len(named), AT_ONCE):
        batch = named[first : first + AT_ONCE]
        try:
            all_errors: list[Any] = run(batch)
        except Exception:  # one of them; a program that fails loses nothing of the others
            spmd.roll_back()
            all_errors = []
            for one in batch:
                try:
                    all_errors += run([one])
                except Exception as error:
                    spmd.roll_back()
                    all_errors.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
        for (layout, source), errors in zip(batch, all_errors):
            if isinstance(errors, str):
                yield "error", f"{layout}, {source}: {errors}"
            elif not all(error <= call.tolerance for error in errors):  # false for NaN too
                yield "wrong", f"{layout}, {source}: {', '.join(f'{e:.1e}' for e in errors)}"


def _mesh(sizes: str) -> spmd.Mesh:
    shape = tuple(map(int, sizes.split(",")))
    return spmd.Mesh(range(math.prod(shape)), shape, AXES[: len(shape)])


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    call, mesh = CALLS[task["call"]], _mesh(task["mesh"])
    arrays = call.arrays(task["size"])
    with jax.enable_x64(True):
        first = jax.tree.leaves(jax.eval_shape(call.function, *arrays))[0]
    ndims = [*(x.ndim for x in arrays), len(first.shape)]
    tried = layouts(ndims, task["limit"], axes=AXES[: len(mesh.mesh_shape)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(call, task["size"], mesh, tried))
    return {"layouts": len(tried), **{k: [x for kind, x in found if kind == k] for k in KINDS}}


KINDS = ("wrong", "error")


def _lost(task: dict[str, Any], what: str) -> dict[str, Any]:
    """The answer where the worker died or was too slow."""
    return {"layouts": 0, "wrong": [], "error": [what]}


def main(args: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the partitioner warns of slow layouts
    if args.worker:
        start()
        workers.serve(_answer)
        return 0
    names = [n for n in CALLS if any(fnmatch.fnmatch(n, p) for p in args.calls.split(","))]
    if not names:
        parser.error(f"--calls names none of {', '.join(CALLS)}; got {args.calls!r}")
    tasks = [
        {"call": name, "size": size, "mesh": mesh, "limit": args.limit}
        for name, mesh, size in itertools.product(names, args.mesh or MESHES, SIZES)
    ]
    journal = args.out / "partitioner_jax.journal"
    answers = workers.run(
        tasks,
        [sys.executable, "-m", "benchmarks.partitioner.jax_functions", "--worker"],
        lost=_lost,
        jobs=args.jobs,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
        what="functions x meshes x sizes",
    )
    journal.unlink()
    rows, notes, data = [], [], []
    for task, answer in zip(tasks, answers):
        where = f"{task['call']}, mesh {task['mesh']}, {task['size']} sizes"
        counts = [str(answer["layouts"]), *(str(len(answer[kind])) for kind in KINDS)]
        rows.append([task["call"], task["mesh"], task["size"], *counts])
        notes += [f"**{kind}**: {where}, {line}" for kind in KINDS for line in answer[kind]]
        data.append({**task, **answer})
    total = sum(answer["layouts"] for answer in answers)
    title = f"{total:,} layouts of jax functions called by call_jax, against jax on one device"
    table = Table(title, ["function", "mesh", "sizes", "layouts", "wrong", "error"], rows, notes)
    if args.show:
        table.show()
    else:
        publish("partitioner_jax", table, {"calls": data}, folder=args.out)
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main(args))
