"""What the recipes lower, on several meshes, for CPUs and for TPUs.

Each run is planned (`spmd_core.plan`) at its smoke size: its programs are recorded and lowered, and
neither compiled nor run. Those of two versions are compared by `benchmarks.lowered.texts`.

Run: python -m benchmarks.lowered.recipes after
     python -m benchmarks.lowered.recipes after --only "gpt2 fsdp=8"
"""

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the folder of programs")
    parser.add_argument("--only", default="", help="runs whose label has this text")
    args = parser.parse_args()

import spmd_core as spmd
from benchmarks.lowered import texts
from spmd_core.errors import DeviceMemoryError
from spmd_core.graph.placement import Placement
from spmd_core.planner import plan as planning
from spmd_core.program import ir, planned_program
from spmd_core.program.lower import lower as lower_graph
from spmd_core.program.target import Target
from spmd_core.runtime.jax_sharding import replicated

# 8 devices of each.
TOPOLOGIES = {"cpu": "cpu-8", "tpu": "v4-16"}
COMMON = ("--smoke", "--no-progress", "--eval-batches=0")
# By recipe: the options of each run.
RUNS = {
    "gpt2": (
        "--mesh=fsdp=8",
        "--mesh=fsdp=4,tensor=2",
        "--mesh=data=8",
        "--mesh=data=1 --mesh-devices=1 --dtype=bf16 --remat=full",
        "--mesh=fsdp=8 --dtype=bf16 --remat=full",
        "--mesh=fsdp=8 --dtype=bf16 --remat=offload",
        "--mesh=fsdp=8 --dtype=bf16 --remat=products --accumulate=2 --batch=16",
        "--mesh=fsdp=4,tensor=2 --dtype=bf16 --remat=full --accumulate=2 --batch=16",
        "--mesh=data=2,fsdp=4 --strategy=fsdp --dtype=bf16 --remat=full",
        "--mesh=fsdp=8 --strategy=fsdp --accumulate=2 --batch=16",
        "--mesh=data=8 --strategy=ddp",
        "--mesh=pipe=2,data=4 --strategy=pipeline",
        "--mesh=pipe=2,fsdp=4 --strategy=pipeline --schedule=gpipe --dtype=bf16",
        "--mesh=fsdp=8 --pack",
    ),
    "llama_tp": (
        "--mesh=fsdp=8",
        "--mesh=data=2,tensor=4",
        "--mesh=data=2,tensor=4 --sequence-parallel --loss-parallel",
        "--mesh=fsdp=4,tensor=2 --dtype=bf16 --remat=full --sequence-parallel",
        "--mesh=data=2,context=4",
        "--mesh=data=2,tensor=4 --lora=4 --dtype=bf16",
        "--mesh=data=2,tensor=4 --accumulate=2 --batch=16",
    ),
    "resnet_spatial": (
        "--mesh=data=8",
        "--mesh=data=2,height=2,width=2",
        "--mesh=height=4,width=2 --dtype=bf16",
    ),
}


def _lowered(seen: planning._Seen, topology: object, *, machine_code: bool) -> None:
    """Replaces a plan's compilation: only lowers the program."""
    graph = ir.Graph.of(seen.program.graph)
    lower_graph(graph, Target.of(graph), seen.program.name)
    raise DeviceMemoryError("lowered, not compiled")


def _placement(self: planned_program.PlannedProgram, output: object) -> Placement | None:
    """Results whose sharding a compilation would choose are replicated."""
    known = _known_placement(self, output)  # type: ignore[arg-type]
    return known or Placement.of(replicated(self.graph.device_ids), None)


_known_placement = planned_program.PlannedProgram._placement


def lower(module: str, options: list[str], topology: str) -> None:
    """Plans a recipe, and has all programs of it lowered."""
    main: Callable[[list[str]], int] = importlib.import_module(module).main
    with (
        mock.patch.object(planning, "_compiled", _lowered),
        mock.patch.object(planned_program.PlannedProgram, "_placement", _placement),
        contextlib.redirect_stdout(sys.stderr),
    ):
        spmd.plan(lambda: main(options), topology=topology, quiet_steps=1, compile_all=True)


def main(args: argparse.Namespace) -> int:
    with texts.recorded(args.output):
        for recipe, runs in RUNS.items():
            for run in runs:
                for platform, topology in TOPOLOGIES.items():
                    label = f"{recipe} {run.replace('--', '').replace('mesh=', '')} on {platform}"
                    if args.only not in label:
                        continue
                    start = time.perf_counter()
                    with texts.labelled(label):
                        options = [*COMMON, *run.split()]
                        lower(f"examples.{recipe}.train", options, topology)
                    num = len(texts.found.get(label, []))
                    print(f"{label}: {num} programs, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(args))
