"""How much memory does it take to load a large file of weights into shards, and to save it?

A process of its own makes a model on eight emulated devices under `with torch.device("xla")`, marks
it, and loads the file. Emulated devices hold their shards in the memory of the process. So it grows
by the bytes of all shards, and should grow by little else: no second copy of a tensor, no pages of
the file, no recorded initialisation. A limit on the memory that it may have (RLIMIT_DATA), set just
before, ends a run that takes more. The files are float32 and bfloat16; the model is float32.

Run: python -m benchmarks.weights
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import existing, num_layers
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--layers",
        type=num_layers(),
        default=16,
        help="layers of 0.27 GB in float32 (default 16)",
    )
    parser.add_argument(
        "--scratch",
        type=existing("folder"),
        default=Path(tempfile.gettempdir()),
        help="folder for the file and its copy (default: the system's for temporary files)",
    )
    parser.add_argument(
        "--only",
        type=existing("file"),
        help="measure this file and print JSON; the script uses this option",
    )
    args = parser.parse_args()

import numpy as np
import torch
from torch import nn

import spmd_core as spmd
from benchmarks.memory import held_bytes, max_rss_bytes

NUM_DEVICES = 8
WIDTH = 4096
ALLOWED_BYTES = 200_000_000  # beside the shards: a shard, a piece of the file, the allocator
ITEM_BYTES = {"F32": 4, "BF16": 2}


def sizes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model by its name."""
    layer = {"weight": (4 * WIDTH, WIDTH), "bias": (4 * WIDTH,)}
    return {f"{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}


def write_file(path: Path, num_layers: int, dtype: str) -> None:
    """A file of random weights, written a tensor at a time."""
    header, end = {}, 0
    for name, shape in sizes(num_layers).items():
        begin, end = end, end + torch.Size(shape).numel() * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in sizes(num_layers).values():
            drawn = random.standard_normal(shape, np.float32)
            # The upper half of a float32 is a bfloat16.
            stored = drawn if dtype == "F32" else (drawn.view(np.uint32) >> 16).astype("<u2")
            file.write(stored.data)


def measure(path: Path, num_layers: int) -> dict[str, Any]:
    """Loads and saves, in a process of its own."""
    spmd.simulate(NUM_DEVICES)
    spmd.use_spmd()
    mesh = spmd.Mesh(range(NUM_DEVICES), (NUM_DEVICES,), ("tensor",))
    torch.ones(8, device="xla").sum().item()  # starts the runtime
    with torch.device("xla"):
        layers = [nn.Linear(WIDTH, 4 * WIDTH) for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    for i, layer in enumerate(layers):  # by rows and by columns in turn
        spmd.mark_sharding(layer.weight, mesh, ((None, "tensor") if i % 2 else ("tensor", None)))
    shard_bytes = sum(t.nbytes for t in model.state_dict().values())
    tensor_bytes = layers[0].weight.nbytes
    before, before_data = held_bytes(), status_bytes("VmData")
    if before_data is not None:
        limit_data(before_data + shard_bytes + ALLOWED_BYTES)
    start = time.perf_counter()
    spmd.load_safetensors(model, path)
    load_s, loaded = time.perf_counter() - start, peak_bytes()
    if before_data is not None:
        limit_data(before_data + shard_bytes + ALLOWED_BYTES + tensor_bytes)
    start = time.perf_counter()
    spmd.save_safetensors(model, path.parent / "saved")
    return {
        "file_bytes": path.stat().st_size,
        "shard_bytes": shard_bytes,
        "base_bytes": before,
        "loaded_bytes": held_bytes(),
        "load_peak_bytes": loaded,
        "load_s": load_s,
        "save_peak_bytes": peak_bytes(),
        "save_s": time.perf_counter() - start,
        "limited": before_data is not None,
    }


def peak_bytes() -> int:
    """The peak memory of this process; where Linux does not say, of its parent too."""
    return status_bytes("VmHWM") or max_rss_bytes()


def status_bytes(field: str) -> int | None:
    """A figure of Linux about this process; None elsewhere. RLIMIT_DATA counts `VmData`."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:")), None)


def limit_data(num_bytes: int) -> None:
    """Limits the memory that this process may have; an allocation beyond it fails."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def run(dtype: str, num_layers: int, folder: Path) -> dict[str, Any]:
    """Measures one file, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "model.safetensors"
        write_file(path, num_layers, dtype)
        command = [sys.executable, "-m", "benchmarks.weights", "--only", str(path)]
        command += ["--layers", str(num_layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(args: argparse.Namespace) -> int:
    if args.only:
        print(json.dumps(measure(args.only, args.layers)))
        return 0
    found = {dtype: run(dtype, args.layers, args.scratch) for dtype in ITEM_BYTES}

    def gb(num_bytes: float) -> str:
        return f"{num_bytes / 1e9:.2f} GB"

    rows = [
        [
            dtype,
            gb(case["file_bytes"]),
            gb(case["shard_bytes"]),
            gb(case["base_bytes"]),
            gb(case["load_peak_bytes"]),
            gb(case["load_peak_bytes"] - case["base_bytes"] - case["shard_bytes"]),
            f"{case['load_s']:.0f} s",
            gb(case["save_peak_bytes"] - case["base_bytes"] - case["shard_bytes"]),
            f"{case['save_s']:.0f} s",
        ]
        for dtype, case in found.items()
    ]
    holds = all(
        case["load_peak_bytes"] < case["base_bytes"] + case["shard_bytes"] + ALLOWED_BYTES
        for case in found.values()
    )
    limited = all(case["limited"] for case in found.values())
    notes = [
        f"{verdict(holds)}: loading takes less than {ALLOWED_BYTES / 1e6:.0f} MB beside the shards "
        "and the process before.",
        f"{verdict(limited)}: the process ran under a limit, RLIMIT_DATA, of just that, and of one "
        "whole tensor more while it saved.",
        f"A tensor has {4 * WIDTH * WIDTH * 4 / 1e6:,.0f} MB, its shard an eighth of it. Saving "
        "gathers one tensor at a time.",
    ]
    columns = ["file", "its size", "shards", "process before", "peak of loading", "beside shards"]
    columns += ["time", "saving: beside shards", "time"]
    table = Table(
        f"Weights from and to safetensors, {NUM_DEVICES} emulated devices", columns, rows, notes
    )
    publish("weights", table, {"num_devices": NUM_DEVICES, "cases": found}, folder=args.out)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(args))
