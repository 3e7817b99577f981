"""What of automatic sharding is there before it is used: the switch, and `auto_policy`.

The search needs scipy and takes a while to import, so it is imported when it is asked for.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spmd_core.arguments import checked, require_bool, require_kind
from spmd_core.graph.recorders import lock
from spmd_core.marks import dtensor
from spmd_core.planner import plan
from spmd_core.planner.planned import FoundShardings
from spmd_core.planner.topology import Topology
from spmd_core.program import automatic
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh


@dataclass(frozen=True)
class _Planned:
    """The plan that is being made.

    Attributes:
        topology: its devices.
        stays_on: whether the plan itself asks for automatic sharding, which no script turns off.
        found: gets what is found for each program that is searched.
    """

    topology: Topology
    stays_on: bool
    found: list[FoundShardings] = field(default_factory=list)


# Guarded by: the graph lock. Cleared by: the end of the plan.
_planned: _Planned | None = None


@checked()
def use_spmd(*, auto: bool = False, mesh: Mesh | None = None) -> None:
    """Turns on SPMD mode: one program over all devices, partitioned as the marks say.

    Tensors that exist already stay valid. With `auto`, shardings are found for what is not marked:
    each new program with a matrix product or a convolution is searched as by `auto_shard` when it
    is about to be compiled. The first one chooses the mesh; its parameters and state are marked, so
    that `tensor.sharding` shows their shardings, and inputs of later steps are split as it has
    chosen when they are uploaded. Weights that are drawn on the device wait for that, so that
    each device draws its shards. Marks of the user stay, and are constraints. A program with
    `shard_map`, a pipeline or stacked layers runs as it is. In a function that `plan` runs, this is
    about the programs of that plan, which then has their shardings.

    Args:
        auto: whether shardings are found automatically from now on; a call without it turns that
            off, and tensors keep their marks.
        mesh: with `auto`, the mesh to use; by default the best one is chosen.

    Raises:
        ValueError: a mesh was given without `auto`.
        AutoShardingError: raised by a step, if marks contradict each other or nothing fits.
    """
    require_bool("auto", auto)
    require_kind("mesh", mesh, Mesh, type(None), write="for instance mesh=Mesh(range(8), (8,))")
    if mesh is not None and not auto:
        raise ValueError(
            "use_spmd takes a mesh for automatic sharding alone; got a mesh without auto=True. "
            "Write use_spmd(auto=True, mesh=mesh), or set_global_mesh(mesh)."
        )
    if auto:
        start(() if mesh is None else mesh)
        return
    devices.use_spmd()
    if _planned is None or not _planned.stays_on:
        with lock:
            automatic.search = None


def start(mesh: Mesh | tuple[int, ...]) -> None:
    """Turns on SPMD mode and automatic sharding, over a mesh or one of this shape; () for any.

    Starts no devices: whether a shape fits them is seen at the first search.
    """
    devices.use_spmd()
    _start(mesh)


def _start(mesh: Mesh | tuple[int, ...]) -> None:
    mode = importlib.import_module("spmd_core.auto.mode")
    if _planned is None:
        mode.start(mesh)
    else:
        mode.start(mesh, _planned.topology, _planned.found)


def is_automatic() -> bool:
    """Whether shardings are found automatically."""
    return automatic.search is not None


@contextmanager
def _in_plan(topology: Topology, is_on: bool) -> Iterator[list[FoundShardings]]:
    """Inside, automatic sharding is that of a plan for these devices, and off if `is_on` is False.

    Yields:
        A list that gets what is found for each program that is searched.
    """
    global _planned
    made = _Planned(topology, is_on)
    with automatic.paused():
        with lock:
            _planned = made
        try:
            if is_on:
                _start(())
            yield made.found
        finally:
            with lock:
                _planned = None


def install() -> None:
    """Lets `distribute_module(module, mesh, auto_policy)` and `plan` turn it on."""
    dtensor.on_auto_policy = lambda mesh: use_spmd(auto=True, mesh=mesh)
    plan.automatic = _in_plan
