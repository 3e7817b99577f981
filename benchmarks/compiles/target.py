"""What is compiled for: a TPU's topology, by its compiler; CUDA, by lowering alone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import spmd_core as spmd
from spmd_core.graph.placement import Placement
from spmd_core.planner import topology
from spmd_core.program import ir, planned_program
from spmd_core.program import target as lowering_target
from spmd_core.program.lower import Lowered, lower
from spmd_core.program.program import Program, new_record
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime import abstract, devices
from spmd_core.runtime.jax_sharding import replicated

CUDA = "cuda"


class Target:
    """Devices for which programs are made and not run.

    Args:
        name: a topology's, such as "v4-8", or "cuda".
        num_devices: how many of its devices programs use.

    Raises:
        PlanError: no such topology, or its compiler is not installed.
    """

    def __init__(self, name: str, *, num_devices: int = 1) -> None:
        self.name, self.num_devices = name, num_devices
        # jax lowers for CUDA from any device; XLA's compiler for it would need a GPU.
        self._devices = topology.find_topology(
            f"cpu-{num_devices}" if name == CUDA else name
        ).devices
        if len(self._devices) < num_devices:
            raise ValueError(
                f"a topology must have the devices that are asked for; {name} has "
                f"{len(self._devices)}, got {num_devices}. Name a larger one."
            )

    @contextmanager
    def entered(self, on_program: Any) -> Iterator[spmd.Mesh | None]:
        """Inside, the process's devices are these; gives a mesh of them if there are several.

        Args:
            on_program: called with a program and its arguments where a read would run it.
        """
        run = abstract.Run(Path("unused"), on_program, lambda: None)
        with abstract.planning(self._devices[: self.num_devices], run), self._made():
            if self.num_devices == 1:
                yield None
            else:
                spmd.use_spmd()
                yield spmd.Mesh(range(self.num_devices), (self.num_devices,), ("x",))

    def make(self, graph: RecordedGraph) -> None:
        """Compiles a graph for the TPU; lowers it for CUDA.

        Raises:
            NotImplementedError: a kernel of the CPU is in a program for CUDA.
            Exception: whatever the lowerings, jax or XLA raise.
        """
        lowered = _lowered(graph, "program", (CUDA,) if self.name == CUDA else None)
        if self.name != CUDA:
            with jax.enable_x64(True):
                lowered.stage.compile()
            return
        elsewhere = re.search(r"custom_call @(lapack_\w+|\w*callback\w*)", lowered.stage.as_text())
        if elsewhere is not None:
            raise NotImplementedError(f"{elsewhere[1]} is no kernel of CUDA's")

    @contextmanager
    def _made(self) -> Iterator[None]:
        """Inside, programs that a read needs are compiled by `make`."""
        if self.name != CUDA:
            # Nothing reads the buffers that a plan's compilations write down.
            with mock.patch.object(abstract.Run, "compile_options", return_value={}):
                yield
            return
        with (
            mock.patch.object(devices, "platform", return_value="gpu"),
            mock.patch.object(planned_program, "build", _for_cuda),
        ):
            yield


def _lowered(graph: RecordedGraph, name: str, platforms: tuple[str, ...] | None) -> Lowered:
    recorded = ir.Graph.of(graph)
    target = lowering_target.Target.of(recorded)
    return lower(recorded, target, name, platforms=platforms)


def _for_cuda(graph: RecordedGraph, name: str, **options: Any) -> Program:
    """A program that is lowered alone; results that the partitioner would place are replicated."""
    lowered = _lowered(graph, name, (CUDA,))
    whole = Placement.of(replicated(graph.device_ids), None)
    placements = tuple(whole if p is None else p for p in lowered.out_placements)
    return Program(lowered, None, placements, new_record(graph, name))
