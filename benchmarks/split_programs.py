"""Does a program take longer to compile and to run when its dims are split?

Each program is a forward and a backward: with its tensors replicated, and under each layout of them
over meshes of one axis and of two. Its first run is measured, which is recording, lowering, XLA's
compilation, and execution, in CPU time of all threads, as other work on the machine changes that
little. The target is at most twice the time of the replicated one.

Run: python -m benchmarks.split_programs
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    options = argument_parser(__doc__).parse_args()
    os.environ["SPMD_CACHE_DIR"] = ""  # each program is to be compiled

import torch
from torch import distributions
from torch.nn import functional as F
from tqdm import tqdm

import spmd_core as spmd

NUM_DEVICES = 8
MOST = 2.0
ROUNDS = 3  # of each layout, with other sizes each time, so that nothing is known already

Tensors: TypeAlias = list[torch.Tensor]
Specs: TypeAlias = Sequence[tuple[Any, ...] | None]


@dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        make: tensors on the CPU, from a number that makes their sizes new.
        step: of the tensors on the device; the sum of its result gives gradients.
        layouts: mesh axes' sizes, and a spec for each tensor.
    """

    make: Callable[[int], Tensors]
    step: Callable[..., torch.Tensor]
    layouts: Sequence[tuple[tuple[int, ...], Specs]]


_ROWS = (((8,), [("a",)]), ((8,), [(None, "a")]), ((4, 2), [("a", "b")]), ((4, 2), [(("a", "b"),)]))


def _running(name: str, dim: int) -> Program:
    def step(x: torch.Tensor) -> torch.Tensor:
        found = getattr(torch, name)(x, dim)
        return found if isinstance(found, torch.Tensor) else found[0]

    return Program(lambda more: [torch.rand(512 + more, 64)], step, _ROWS)


def _moe(num_experts: int) -> Program:
    """The dispatch of a mixture of experts, as transformers writes it."""
    width, inner, tokens, chosen = 64, 32, 2048, 2

    def step(
        x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        weights, experts = (x @ router).softmax(-1).topk(chosen, -1)
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.histc(flat[order].float(), bins=num_experts, min=0, max=num_experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(x[order // chosen], up, offs=ends))
        out = F.grouped_mm(hidden, down, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // chosen, out)

    def make(more: int) -> Tensors:
        shapes = [(tokens + 8 * more, width), (width, num_experts)]
        matrices = [(num_experts, width, inner), (num_experts, inner, width)]
        return [torch.randn(*shape) for shape in (*shapes, *matrices)]

    layouts = (
        ((8,), [("a",), None, None, None]),
        ((8,), [("a",), None, ("a",), ("a",)]),
        ((8,), [None, None, (None, None, "a"), (None, "a")]),
        ((4, 2), [("a",), None, ("b",), ("b",)]),
        ((4, 2), [("a",), None, ("a", None, "b"), ("a", "b")]),
    )
    return Program(make, step, layouts)


def _distribution(make: Callable[[torch.Tensor], distributions.Distribution]) -> Program:
    def step(x: torch.Tensor) -> torch.Tensor:
        found = make(x)
        sample = found.rsample() if found.has_rsample else found.sample()
        return found.log_prob(sample.detach()).sum() + sample.sum()

    return Program(lambda more: [torch.rand(16, 24 + more) + 0.5], step, _ROWS[:3])


_SUMS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
PROGRAMS: dict[str, Program] = {
    **{f"{name}, dim {dim}": _running(name, dim) for name in _SUMS for dim in (0, 1)},
    "mixture of 8 experts": _moe(8),
    "mixture of 128 experts": _moe(128),
    "Normal": _distribution(lambda p: distributions.Normal(p, p)),
    "Gamma": _distribution(lambda p: distributions.Gamma(p, p)),
    "Dirichlet": _distribution(distributions.Dirichlet),
    "Poisson": _distribution(distributions.Poisson),
    "Categorical": _distribution(lambda p: distributions.Categorical(p)),
}


def seconds(program: Program, axes: tuple[int, ...], specs: Specs, more: int) -> float:
    """CPU seconds of the first step, of all threads; waits."""
    torch.manual_seed(0)
    mesh = spmd.Mesh(range(NUM_DEVICES), axes, ("a", "b")[: len(axes)])
    tensors = [x.to("xla") for x in program.make(more)]
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec is not None:
            spmd.mark_sharding(tensor, mesh, spec)
    for tensor in tensors:
        tensor.requires_grad_()
    spmd.sync(wait=True)
    start = time.process_time()
    program.step(*tensors).sum().backward()
    spmd.sync(wait=True)
    return time.process_time() - start


def main(options: argparse.Namespace) -> int:
    spmd.simulate(NUM_DEVICES)
    spmd.use_spmd()
    spmd.config.bound_growing_sizes = False  # each size is compiled
    spmd.config.warn_of_recompiles = False
    found: dict[str, dict[str, list[float]]] = {}
    runs = [(name, more) for more in range(1, ROUNDS + 1) for name in PROGRAMS]
    for name, more in tqdm(runs, disable=None):
        program = PROGRAMS[name]
        replicated = ((NUM_DEVICES,), [None] * len(program.layouts[0][1]))
        for axes, specs in (replicated, *program.layouts):
            label = "replicated" if specs is replicated[1] else f"{axes}: {list(specs)}"
            times = found.setdefault(name, {}).setdefault(label, [])
            times.append(seconds(program, axes, specs, more))
    rows, all_hold = [], True
    for name, by_layout in found.items():
        medians = {label: statistics.median(of) for label, of in by_layout.items()}
        base = medians.pop("replicated")
        worst = max(medians, key=lambda label: medians[label])
        ratio = medians[worst] / base
        all_hold &= ratio <= MOST
        cells = (f"{base:.2f}", f"{min(medians.values()):.2f}", f"{medians[worst]:.2f}")
        rows.append((name, *cells, f"{ratio:.1f}", worst, verdict(ratio <= MOST)))
    table = Table(
        "The first step of split programs",
        (
            "program",
            "replicated, CPU s",
            "fastest layout",
            "slowest",
            "of replicated",
            "which",
            "reached",
        ),
        rows,
        [
            f"Forward and backward on {NUM_DEVICES} emulated devices: recorded, lowered, compiled "
            f"and run once, in CPU time of all threads; medians of {ROUNDS} sizes. Reached: at "
            f"most {MOST:g} times the step whose tensors are replicated."
        ],
    )
    data = [
        {"program": name, "layout": label, "split_s": times, "replicated_s": by["replicated"]}
        for name, by in found.items()
        for label, times in by.items()
        if label != "replicated"
    ]
    publish("split_programs", table, {"layouts": data}, folder=options.out)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main(options))
