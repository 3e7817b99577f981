"""Does a sharded model take the memory of its shards, and no more, while it is drawn?

A model that is created under `with torch.device("xla")` and marked before its first use is drawn by
one program, each device its own shards.

(a) Compiled and not run: the peak of one device against its shards, for models and topologies. The
    TPU needs libtpu, and is left out without it.
(b) Run, in a process of its own, on emulated devices: their shards and temporaries are in the
    memory of the process, so it grows by the peaks of all devices.
(c) In the same process: the time that it takes, against one jax program that draws normals of the
    same shapes by jax's own generator.

Run: python -m benchmarks.initialisation
"""

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only-run",
        action="store_true",
        help="print parts (b) and (c) as JSON and exit; the script starts a process with this "
        "option",
    )
    args = parser.parse_args()

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

import spmd_core as spmd
from benchmarks import jax_gpt2_step as reference
from benchmarks.memory import held_bytes, max_rss_bytes, mb
from examples.gpt2 import model as gpt2
from examples.gpt2 import presets as gpt2_presets
from examples.gpt2 import shardings as gpt2_shardings
from examples.llama_tp import model as llama
from examples.llama_tp import presets as llama_presets
from examples.llama_tp import shardings as llama_shardings
from spmd_core.planner.topology import libtpu_version

MAX_PEAK = 1.10  # of the shards of one device
MAX_TIME = 1.05  # of jax's own samplers
NUM_DEVICES = 8
RUN_PRESET = "0.5B"
ROUNDS = 3
TOPOLOGIES = ("cpu-8", "cpu-1", "v4-16", "v4-2")  # v4 counts cores, of which a chip has two


def make_gpt2(name: str) -> nn.Module:
    preset = gpt2_presets.PRESETS[name]
    vocab_size = gpt2_presets.padded_vocab(preset.vocab_size, 128)
    return gpt2.build_model(preset, vocab_size=vocab_size, dropout=0.0)


def make_llama(name: str) -> nn.Module:
    preset = llama_presets.PRESETS[name]
    return llama.build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)


def split_llama(model: Any, mesh: spmd.Mesh) -> None:
    """By the recipe: a plan of tensor parallelism, and fsdp of what that splits."""
    llama_shardings.parallelize(model, mesh, sequence_parallel=True, loss_parallel=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the dtype in which it is created.

    Attributes:
        parallelize: shards it over a mesh of fsdp and tensor, as the recipes do; None: each
            parameter's largest dim is split over one axis.
    """

    label: str
    make: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    parallelize: Callable[[Any, spmd.Mesh], None] | None = None


CASES = (
    Case("GPT-2 0.5B", functools.partial(make_gpt2, "0.5B")),
    Case("GPT-2 4B", functools.partial(make_gpt2, "4B")),
    Case("Llama 1B", functools.partial(make_llama, "1B")),
    Case("Llama 1B, bfloat16", functools.partial(make_llama, "1B"), torch.bfloat16),
)
NUM_TENSOR = 2  # shards over the axis tensor, of these
ON_TWO_AXES = (
    Case(
        "GPT-2 4B, fsdp x tensor",
        functools.partial(make_gpt2, "4B"),
        parallelize=gpt2_shardings.shard_parameters,
    ),
    Case("Llama 1B, fsdp x tensor", functools.partial(make_llama, "1B"), parallelize=split_llama),
)


def marked_model(case: Case, *, num_devices: int) -> nn.Module:
    """The model, created on the device and marked before any computation."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.device("xla"):
            model = case.make()
    finally:
        torch.set_default_dtype(before)
    if case.parallelize is not None:
        shape = (num_devices // NUM_TENSOR, NUM_TENSOR)
        case.parallelize(model, spmd.Mesh(range(num_devices), shape, ("fsdp", "tensor")))
        return model
    mesh = spmd.Mesh(range(num_devices), (num_devices,), (reference.AXIS,))
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, reference.partition_spec(tuple(p.shape), num_devices))
    return model


def shard_bytes(model: nn.Module) -> int:
    """Bytes of the parameters on one device."""
    total = 0
    for p in model.parameters():
        sharding: Any = getattr(p, "sharding")  # noqa: B009  (torch's annotations lack it)
        shape = tuple(p.shape) if sharding is None else sharding.shard_shape(tuple(p.shape))
        total += math.prod(shape) * p.itemsize
    return total


def compiled(case: Case, topology: str) -> dict[str, Any]:
    """Part (a), for one model and topology."""
    number = int(topology.rpartition("-")[2])
    num_devices = number if topology.startswith("cpu") else number // 2
    shards = []

    def create() -> None:
        spmd.use_spmd()
        model = marked_model(case, num_devices=num_devices)
        shards.append(shard_bytes(model))
        spmd.sync()

    planned = spmd.plan(create, topology=topology).largest
    assert planned is not None, "creating a model computes something"
    return {
        "model": case.label,
        "topology": topology,
        "num_devices": num_devices,
        "shard_bytes": shards[0],
        "peak_bytes": planned.peak_bytes,
        "share": planned.peak_bytes / shards[0],
    }


def jax_draw(sizes: list[tuple[int, ...]], num_devices: int) -> Callable[[int], list[jax.Array]]:
    """One jax program that draws normals of these shapes, split as the model's parameters are."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (reference.AXIS,))
    specs = [PartitionSpec(*reference.partition_spec(size, num_devices)) for size in sizes]

    @functools.partial(jax.jit, out_shardings=[NamedSharding(mesh, spec) for spec in specs])
    def draw(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(sizes))
        return [
            jax.random.normal(k, size, np.float32) * np.float32(0.02)
            for k, size in zip(keys, sizes)
        ]

    return lambda seed: jax.block_until_ready(draw(jax.random.key(seed)))


def measure_run(num_devices: int) -> dict[str, Any]:
    """Parts (b) and (c)."""
    # A small model first: the memory of the runtime itself must not count as the model's.
    warm_up = marked_model(Case("", functools.partial(make_gpt2, "smoke")), num_devices=num_devices)
    spmd.sync(wait=True)
    del warm_up
    case = Case(RUN_PRESET, functools.partial(make_gpt2, RUN_PRESET))
    spmd.metrics.reset()
    start, held = max_rss_bytes(), held_bytes()
    model = marked_model(case, num_devices=num_devices)
    recorded = max_rss_bytes()
    spmd.debugging.hlo()  # compiles what sync() runs
    compiled_at, held_compiled = max_rss_bytes(), held_bytes()
    spmd.sync(wait=True)
    result: dict[str, Any] = {
        "num_params": sum(p.numel() for p in model.parameters()),
        "full_bytes": sum(p.nbytes for p in model.parameters()),
        "shard_bytes": shard_bytes(model),
        "peak_bytes": max(program.peak_bytes for program in spmd.metrics.programs()),
        "uploaded_bytes": spmd.metrics.counter("uploaded_bytes"),
        "growth_recording_bytes": recorded - start,
        "growth_compiling_bytes": compiled_at - recorded,
        "growth_running_bytes": max_rss_bytes() - held_compiled,
        "held_bytes": held_bytes() - held,
    }
    sizes = [tuple(p.shape) for p in model.parameters() if p.dim() > 1]
    draw = jax_draw(sizes, num_devices)
    draw(0)  # compiles
    times = {"model": (Samples(), Samples()), "jax": (Samples(), Samples())}
    del model
    for seed in range(ROUNDS):
        model = marked_model(case, num_devices=num_devices)
        with Stopwatch() as ours:
            spmd.sync(wait=True)
        del model
        with Stopwatch() as theirs:
            draw(seed)
        for name, watch in (("model", ours), ("jax", theirs)):
            times[name][0].add(watch.wall_s)
            times[name][1].add(watch.cpu_s)
    for kind, i in (("wall", 0), ("cpu", 1)):
        model_s, jax_s = times["model"][i], times["jax"][i]
        result |= {f"model_{kind}_samples_s": model_s.values, f"jax_{kind}_samples_s": jax_s.values}
        result[f"{kind}_ratio"] = model_s.min / jax_s.min
    return result


def report(plans: list[dict[str, Any]], run: dict[str, Any], *, folder: Path) -> bool:
    """Publishes the table; whether all targets are reached."""
    full = run["full_bytes"]
    targets = {
        f"(a) every peak is at most {MAX_PEAK:g} times the shards": max(p["share"] for p in plans)
        <= MAX_PEAK,
        f"(b) computing grows the process by at most {MAX_PEAK:g} full copies, which are the "
        f"shards of {NUM_DEVICES} devices": run["growth_running_bytes"] <= MAX_PEAK * full,
        "(b) recording grows it by less than 1% of a copy, and nothing is uploaded": run[
            "growth_recording_bytes"
        ]
        < 0.01 * full
        and run["uploaded_bytes"] < 0.01 * full,
        f"(c) drawing takes at most {MAX_TIME:g} times the CPU time of jax's own samplers": run[
            "cpu_ratio"
        ]
        <= MAX_TIME,
    }
    rows = [
        [
            f"(a) {p['model']}, {p['topology']} ({p['num_devices']} devices)",
            mb(p["shard_bytes"]),
            mb(p["peak_bytes"]),
            f"{p['share']:.4f}",
        ]
        for p in plans
    ]
    rows += [
        [
            f"(b) GPT-2 {RUN_PRESET} run: all {NUM_DEVICES} devices, the process's growth",
            mb(full),
            mb(run["growth_running_bytes"]),
            f"{run['growth_running_bytes'] / full:.4f}",
        ],
        [
            "(b) the growth before, by recording and by the compiler",
            "",
            mb(run["growth_recording_bytes"] + run["growth_compiling_bytes"]),
            "",
        ],
    ]
    notes = [
        f"(c) Drawing takes {run['wall_ratio']:.2f} times the wall time and {run['cpu_ratio']:.2f} "
        f"times the CPU time of jax's own samplers, each the least of {ROUNDS} runs that alternate "
        f"({min(run['model_cpu_samples_s']):.2f} s and {min(run['jax_cpu_samples_s']):.2f} s).",
        "(b) is the growth beyond what the process had with the program compiled. Pages that the "
        "compiler had freed are in that, and drawing uses them: so it may be less than the shards.",
        *(f"{verdict(holds)}: {target}." for target, holds in targets.items()),
    ]
    table = Table(
        "Memory while a model is drawn", ["", "shards", "peak", "peak / shards"], rows, notes
    )
    publish(
        "initialisation", table, {"plans": plans, "run": run, "targets": targets}, folder=folder
    )
    return all(targets.values())


def main(args: argparse.Namespace) -> int:
    # A program from the cache on disk lacks the compiler's full analysis.
    spmd.config.cache_dir = None
    spmd.simulate(NUM_DEVICES)
    spmd.use_spmd()
    if args.only_run:
        print(json.dumps(measure_run(NUM_DEVICES)))
        return 0
    command = [sys.executable, "-m", "benchmarks.initialisation", "--only-run"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL
    )
    run = json.loads(done.stdout.splitlines()[-1])
    spmd.global_runtime_device_count()  # starts the devices, of which the plans take some
    topologies = [t for t in TOPOLOGIES if t.startswith("cpu") or libtpu_version()]
    chosen = [(case, topology) for case in CASES for topology in topologies]
    several = [name for name in topologies if name not in ("cpu-1", "v4-2")]
    chosen += [(case, topology) for case in ON_TWO_AXES for topology in several]
    plans = [compiled(case, topology) for case, topology in chosen]
    return 0 if report(plans, run, folder=args.out) else 1


if __name__ == "__main__":
    sys.exit(main(args))
