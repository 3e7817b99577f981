"""Does a sharded train step hold one copy of its state?

The fixed step's program reuses the buffer of each parameter and optimizer state for its new value:
the bytes that the compiled program aliases equal the bytes of parameters and moments on one device,
and its peak is far below two copies.

Run: python -m benchmarks.memory
"""

import argparse
import gc
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.options import num_devices
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated devices (default 8)"
    )
    args = parser.parse_args()

import torch

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset


def preset_for(shape: reference.Shape) -> ModelPreset:
    """The sizes as a preset of the recipe's model."""
    return ModelPreset(
        "benchmark",
        shape.num_layers,
        shape.width,
        shape.num_heads,
        shape.vocabulary,
        shape.seq,
        shape.seq,
        shape.batch,
        1e-3,
    )


def shard_bytes(sizes: Iterable[tuple[int, ...]], *, num_devices: int) -> int:
    """Bytes on one device of float32 tensors with these shapes, split by `partition_spec`."""
    return sum(
        4
        * torch.Size(size).numel()
        // (1 if reference.largest_dim(size, num_devices) is None else num_devices)
        for size in sizes
    )


def marked_model(shape: reference.Shape, *, num_devices: int) -> tuple[torch.nn.Module, Any]:
    """A model that is created on the device and marked, before any computation; and its mesh."""
    mesh = spmd.Mesh(range(num_devices), (num_devices,), (reference.AXIS,))
    torch.manual_seed(0)
    with torch.device("xla"):
        model = build_model(preset_for(shape), vocab_size=shape.vocabulary, dropout=0.0)
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, reference.partition_spec(tuple(p.shape), num_devices))
    return model, mesh


def measure_step(num_devices: int) -> dict[str, Any]:
    """The memory that the compiled train step aliases and uses."""
    shape = reference.Shape()
    model, mesh = marked_model(shape, num_devices=num_devices)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = spmd.mark_sharding(
        torch.from_numpy(reference.random_tokens(shape)).long().to("xla"),
        mesh,
        (reference.AXIS, None),
    )
    positions = torch.arange(shape.seq)[None].to("xla")
    spmd.sync(wait=True)
    spmd.metrics.reset()
    for _ in range(4):
        logits = model(input_ids=ids, position_ids=positions).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync(wait=True)
    program = max(spmd.metrics.programs(), key=lambda record: record.executions)
    sizes = [tuple(p.shape) for p in model.parameters()]
    return {
        "expected_alias_bytes": 3 * shard_bytes(sizes, num_devices=num_devices),
        "alias_bytes": program.alias_bytes,
        "argument_bytes": program.argument_bytes,
        "output_bytes": program.output_bytes,
        "temp_bytes": program.temp_bytes,
        "peak_bytes": program.peak_bytes,
        "num_donated": len(program.donated),
        "num_state_tensors": 3 * len(sizes),
        "executions": program.executions,
    }


def max_rss_bytes() -> int:
    """The peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def held_bytes() -> int:
    """The current memory of this process after a garbage collection; without /proc, its peak."""
    gc.collect()
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * resource.getpagesize()
        if statm.exists()
        else max_rss_bytes()
    )


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def main(args: argparse.Namespace) -> int:
    # A program from the cache on disk lacks the compiler's full analysis.
    spmd.config.cache_dir = None
    spmd.simulate(args.devices)
    spmd.use_spmd()
    step = measure_step(args.devices)

    state = step["expected_alias_bytes"]
    targets = {
        "aliased bytes equal those of parameters and optimizer state": step["alias_bytes"] == state,
        "the peak without temporaries holds less than two copies of the state": step["peak_bytes"]
        - step["temp_bytes"]
        < 2 * state,
    }
    rows = [
        ["parameters and optimizer state, one device", mb(state), ""],
        [
            "train step: aliased bytes",
            mb(step["alias_bytes"]),
            f"{step['alias_bytes'] / state:.3f} x state",
        ],
        [
            "train step: arguments",
            mb(step["argument_bytes"]),
            f"{step['argument_bytes'] / state:.3f} x state",
        ],
        ["train step: temporary", mb(step["temp_bytes"]), ""],
        ["train step: peak", mb(step["peak_bytes"]), ""],
    ]
    notes = [f"{verdict(holds)}: {target}." for target, holds in targets.items()]
    table = Table(
        f"Memory on {args.devices} emulated devices", ["", "bytes", "relative"], rows, notes
    )
    publish(
        "memory",
        table,
        {"num_devices": args.devices, "step": step, "targets": targets},
        folder=args.out,
    )
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main(args))
