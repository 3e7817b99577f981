"""How much time and memory does attention in blocks take, against torch's composition?

Measures a forward and a backward of causal attention on one device. "math" is the composition that
`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` records: two matrix products around a softmax
whose (queries, keys) matrix is kept for the backward. "blocks" is the device's default on this
platform, which never holds that matrix. Memory is the compiler's figure for the program:
temporaries, and the peak with arguments and results. The two run alternately; the time is the best
of the repeats.

Run: python -m benchmarks.attention
"""

import argparse
import sys
import time
from dataclasses import dataclass, field

from benchmarks.options import whole
from benchmarks.report import Samples, Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--seq",
        type=whole(),
        nargs="+",
        default=[256, 512, 1024, 2048, 4096],
        help="sequence lengths (default 256 512 1024 2048 4096)",
    )
    parser.add_argument("--batch", type=whole(), default=1)
    parser.add_argument("--heads", type=whole(), default=8)
    parser.add_argument("--dim", type=whole(), default=64)
    parser.add_argument(
        "--repeats", type=whole(), default=5, help="timed steps per backend (default 5)"
    )
    args = parser.parse_args()

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import spmd_core as spmd

BACKENDS = {"math": [SDPBackend.MATH], "blocks": [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]}


@dataclass
class Measured:
    """The figures of one backend at one sequence length."""

    samples: Samples = field(default_factory=Samples)
    temp_bytes: int = 0
    peak_bytes: int = 0


def step(inputs: list[torch.Tensor], backend: str) -> float:
    """Seconds of one forward and backward. Waits for both."""
    start = time.perf_counter()
    with sdpa_kernel(BACKENDS[backend]):
        query, key, value = inputs
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
    loss = out.square().sum()
    grads = torch.autograd.grad(loss, inputs)
    loss.item()  # the gradients are pending too, so the same program computes them
    del grads
    return time.perf_counter() - start


def measure(seq: int, *, batch: int, heads: int, dim: int, repeats: int) -> dict[str, Measured]:
    """The figures of both backends at one sequence length."""
    inputs = [torch.randn(batch, heads, seq, dim).to("xla").requires_grad_() for _ in range(3)]
    measured = {backend: Measured() for backend in BACKENDS}
    for repeat in range(repeats + 2):
        for backend, m in measured.items():
            compiles = spmd.metrics.counter("compiles")
            seconds = step(inputs, backend)
            if repeat == 0:  # this step compiles and uploads the inputs
                program = spmd.metrics.programs(since=compiles)[0]
                m.temp_bytes, m.peak_bytes = program.temp_bytes, program.peak_bytes
            elif repeat > 1:
                m.samples.add(seconds)
    return measured


def main(args: argparse.Namespace) -> int:
    spmd.simulate(1)
    sizes = {"batch": args.batch, "heads": args.heads, "dim": args.dim}
    found = {
        seq: measure(seq, **sizes, repeats=args.repeats)
        for seq in tqdm(args.seq, desc="lengths", disable=None)
    }
    rows = [
        [
            str(seq),
            *(f"{m[b].samples.min * 1e3:.1f}" for b in BACKENDS),
            *(f"{m[b].temp_bytes / 1e6:.1f}" for b in BACKENDS),
        ]
        + [f"{m[b].peak_bytes / 1e6:.1f}" for b in BACKENDS]
        for seq, m in found.items()
    ]
    columns = [
        "length",
        "math, ms",
        "blocks, ms",
        "math, temp MB",
        "blocks, temp MB",
        "math, peak MB",
        "blocks, peak MB",
    ]
    notes = [
        f"Forward and backward, causal, float32, {args.batch} x {args.heads} heads of {args.dim}, "
        f"one CPU device; best of {args.repeats} steps."
    ]
    data = {
        "sizes": sizes,
        "lengths": {
            seq: {
                b: {
                    "best_s": m[b].samples.min,
                    "samples_s": m[b].samples.values,
                    "temp_bytes": m[b].temp_bytes,
                    "peak_bytes": m[b].peak_bytes,
                }
                for b in BACKENDS
            }
            for seq, m in found.items()
        },
    }
    publish("attention", Table("Attention in blocks", columns, rows, notes), data, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(args))
