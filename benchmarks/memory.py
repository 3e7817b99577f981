"""Does a sharded train step hold one copy of its state, and initialisation no full copy of a model?

(a) The fixed step's program reuses the buffer of each parameter and optimizer state for its new
    value: the bytes that the compiled program aliases equal the bytes of parameters and moments on
    one device, and its peak is far below two copies.
(b) A model created under `with torch.device("xla")` and marked before its first use is drawn shard
    by shard: the peak of the initialising programs on one device stays well below a full copy.
    Emulated devices use the memory of the process, so the process grows by the peak of all devices:
    the shards, which together are one full copy, and the temporaries of drawing them. The host must
    not add a copy of its own.

Run: python -m benchmarks.memory
"""

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from benchmarks.report import Table, argument_parser, publish, verdict
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset

MAX_INIT_SHARE = 0.5  # of a full copy, on one device
MAX_HOST_SHARE = 0.05  # of a full copy, on the host, without the memory of the emulated devices
MAX_HELD_COPIES = 1.5  # after initialisation; the shards of the emulated devices are one copy


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


def full_bytes(sizes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of float32 tensors with these shapes."""
    return sum(4 * torch.Size(size).numel() for size in sizes)


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
    """Part (a): the memory that the compiled train step aliases and uses."""
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


def measure_init(num_devices: int, *, width: int, num_layers: int) -> dict[str, Any]:
    """Part (b), in a process of its own."""
    # A small model first: the memory of the runtime itself must not count as the model's.
    warm_up, _ = marked_model(reference.Shape(num_layers=1, width=64), num_devices=num_devices)
    spmd.sync(wait=True)
    del warm_up
    spmd.metrics.reset()
    before, held_before = max_rss_bytes(), held_bytes()
    shape = reference.Shape(
        num_layers=num_layers, width=width, num_heads=16, vocabulary=32768, seq=1024
    )
    model, _ = marked_model(shape, num_devices=num_devices)
    lazy = max_rss_bytes()
    spmd.sync(wait=True)
    after = max_rss_bytes()
    sizes = [tuple(p.shape) for p in model.parameters()]
    programs = spmd.metrics.programs()
    return {
        "num_params": sum(p.numel() for p in model.parameters()),
        "full_bytes": full_bytes(sizes),
        "shard_bytes": shard_bytes(sizes, num_devices=num_devices),
        "num_programs": len(programs),
        "peak_bytes": max(program.peak_bytes for program in programs),
        "largest_output_bytes": max(program.output_bytes for program in programs),
        "uploaded_bytes": spmd.metrics.counter("uploaded_bytes"),
        "host_growth_before_sync_bytes": lazy - before,
        "host_growth_bytes": after - before,
        "host_held_bytes": held_bytes() - held_before,
    }


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--devices", type=int, default=8, help="emulated devices (default 8)")
    parser.add_argument(
        "--width", type=int, default=1024, help="width of the model of part (b) (default 1024)"
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="layers of the model of part (b) (default 12)"
    )
    parser.add_argument(
        "--only-init",
        action="store_true",
        help="print part (b) as JSON and exit; the script starts a process with this option",
    )
    args = parser.parse_args()
    if not args.only_init:
        command = [
            sys.executable,
            "-m",
            "benchmarks.memory",
            "--only-init",
            "--devices",
            str(args.devices),
        ]
        command += ["--width", str(args.width), "--layers", str(args.layers)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL
        )
        init = json.loads(done.stdout.splitlines()[-1])

    # A program from the cache on disk lacks the compiler's full analysis.
    spmd.config.cache_dir = None
    spmd.simulate(args.devices)
    spmd.use_spmd()
    if args.only_init:
        print(json.dumps(measure_init(args.devices, width=args.width, num_layers=args.layers)))
        return 0
    step = measure_step(args.devices)

    state = step["expected_alias_bytes"]
    targets = {
        "(a) aliased bytes equal those of parameters and optimizer state": step["alias_bytes"]
        == state,
        "(a) the peak without temporaries holds less than two copies of the state": step[
            "peak_bytes"
        ]
        - step["temp_bytes"]
        < 2 * state,
        f"(b) initialisation peaks under {MAX_INIT_SHARE:.0%} of a full copy on each device": init[
            "peak_bytes"
        ]
        <= MAX_INIT_SHARE * init["full_bytes"],
        "(b) before anything is computed the process grows by less than "
        f"{MAX_HOST_SHARE:.0%} of a full copy": init["host_growth_before_sync_bytes"]
        < MAX_HOST_SHARE * init["full_bytes"],
        f"(b) less than {MAX_HOST_SHARE:.0%} of a full copy is uploaded from the host": init[
            "uploaded_bytes"
        ]
        < MAX_HOST_SHARE * init["full_bytes"],
        f"(b) afterwards the process holds less than {MAX_HELD_COPIES:g} full copies": init[
            "host_held_bytes"
        ]
        < MAX_HELD_COPIES * init["full_bytes"],
    }
    rows = [
        ["(a) parameters and optimizer state, one device", mb(state), ""],
        [
            "(a) train step: aliased bytes",
            mb(step["alias_bytes"]),
            f"{step['alias_bytes'] / state:.3f} x state",
        ],
        [
            "(a) train step: arguments",
            mb(step["argument_bytes"]),
            f"{step['argument_bytes'] / state:.3f} x state",
        ],
        ["(a) train step: temporary", mb(step["temp_bytes"]), ""],
        ["(a) train step: peak", mb(step["peak_bytes"]), ""],
        ["(b) parameters, full copy", mb(init["full_bytes"]), f"{init['num_params']:,} parameters"],
        [
            "(b) parameters, one device",
            mb(init["shard_bytes"]),
            f"{init['shard_bytes'] / init['full_bytes']:.3f} x full",
        ],
        [
            "(b) initialisation: peak, one device",
            mb(init["peak_bytes"]),
            f"{init['peak_bytes'] / init['full_bytes']:.3f} x full",
        ],
        [
            "(b) process growth, all devices in it",
            mb(init["host_growth_bytes"]),
            f"{init['host_growth_bytes'] / init['full_bytes']:.3f} x full",
        ],
        ["(b) of it before anything was computed", mb(init["host_growth_before_sync_bytes"]), ""],
        ["(b) uploaded from the host", mb(init["uploaded_bytes"]), ""],
        [
            "(b) held by the process afterwards",
            mb(init["host_held_bytes"]),
            f"{init['host_held_bytes'] / init['full_bytes']:.3f} x full",
        ],
    ]
    notes = [f"{verdict(holds)}: {target}." for target, holds in targets.items()]
    notes.append(
        f"The growth of the process has no target: it holds {args.devices} emulated devices at "
        f"their peak ({mb(args.devices * init['peak_bytes'])}) and the compiler."
    )
    table = Table(
        f"Memory on {args.devices} emulated devices", ["", "bytes", "relative"], rows, notes
    )
    publish(
        "memory",
        table,
        {"num_devices": args.devices, "step": step, "init": init, "targets": targets},
        folder=args.out,
    )
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
