"""Does a sequence that n devices share take an n-th of the memory?

A training step of a small Llama on one sequence is compiled, and not run, for growing lengths and
numbers of devices. Where the sequence is split, attention is a ring (`spmd.context_parallel`). The
table has the peak of a device without parameters, its share of what one device alone needs, and
what a device sends in a step.

Run: python -m benchmarks.context_parallel
"""

import argparse
import sys
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--lengths",
        type=whole(),
        nargs="+",
        default=[4096, 8192, 16384, 32768],
        help="tokens of a sequence (default 4096 8192 16384 32768)",
    )
    args = parser.parse_args()

import torch
import torch.nn.functional as F
from tqdm import tqdm

import spmd_core as spmd
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS

VOCABULARY = 512
MAX_SHARE = 1.15  # of an n-th of one device's memory, at the longest sequence
COUNTS = (1, 2, 4, 8)


def measure(length: int, num_devices: int) -> dict[str, Any]:
    """The memory and the traffic of a compiled step, forward and backward."""
    torch.manual_seed(0)
    with torch.device("xla"):
        model = build_model(PRESETS["debug"], vocab_size=VOCABULARY, positions=length)
        tokens = torch.zeros(1, length, dtype=torch.int64)
    if num_devices > 1:
        mesh = spmd.Mesh(range(num_devices), (num_devices,), ("context",))
        shardings.parallelize(model, mesh, sequence_parallel=False, loss_parallel=False)
        spmd.mark_sharding(tokens, mesh, shardings.batch_sharding(mesh).partition_spec[1:])
    spmd.sync()
    F.cross_entropy(model(tokens).logits.transpose(1, 2), tokens).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    moved = spmd.debugging.collectives(*grads)
    program = spmd.metrics.programs()[-1]
    return {
        "length": length,
        "num_devices": num_devices,
        "peak_bytes": program.peak_bytes - program.argument_bytes,
        "sent_bytes": round(sum(c.moved_bytes for c in moved)),
    }


def main(args: argparse.Namespace) -> int:
    spmd.config.cache_dir = None  # a program from the cache on disk lacks the full analysis
    spmd.simulate(max(COUNTS))
    spmd.use_spmd()
    cases = [(length, count) for length in args.lengths for count in COUNTS]
    found = [measure(*case) for case in tqdm(cases, unit="program", disable=None)]
    alone = {f["length"]: f["peak_bytes"] for f in found if f["num_devices"] == 1}
    rows = [
        [
            f"{f['length']:,}",
            f"{f['num_devices']}",
            f"{f['peak_bytes'] / 2**20:,.1f} MiB",
            f"{f['peak_bytes'] / alone[f['length']]:.3f}",
            f"{f['sent_bytes'] / 2**20:,.1f} MiB",
        ]
        for f in found
    ]
    last = found[-1]
    share = last["peak_bytes"] / alone[last["length"]]
    holds = share <= MAX_SHARE / last["num_devices"]
    note = (
        f"{verdict(holds)}: {last['length']:,} tokens on {last['num_devices']} devices take at "
        f"most {MAX_SHARE} / {last['num_devices']} of the memory of one device: {share:.3f}."
    )
    table = Table(
        "A step of Llama debug (2 layers, width 64) on one sequence",
        ["tokens", "devices", "peak of a device", "of one device's", "sent by a device"],
        rows,
        [note],
    )
    publish("context_parallel", table, {"found": found, "share": share}, folder=args.out)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(args))
