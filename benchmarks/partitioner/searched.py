"""Random programs without marks, with the shardings of a candidate of automatic sharding.

Each program is searched over its mesh, as if collectives had no latency: small programs would stay
whole otherwise. Of the candidates, the best and those of other kinds, one is drawn and applied to
the program's inputs and to the tensors inside of it. Values are compared as those of other
programs are (`examination`).
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import spmd_core as spmd
from benchmarks.partitioner.examination import Source
from spmd_core.auto.candidates import candidates
from spmd_core.auto.decide import inputs_of
from spmd_core.auto.groups import group
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import shardings
from spmd_core.auto.mode import sharded
from spmd_core.auto.read_step import read_step
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.planner.topology import present
from spmd_core.program import automatic, tensor_names
from spmd_core.program.planning import CutPlan
from spmd_core.sharding.mesh import Mesh


class Searched:
    """The programs of a source of marked ones; see `examination.Source`.

    Args:
        source: its layouts have an attribute `marks`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.name = f"searched_{source.name}"

    def draw(self, mesh: int, seed: int) -> Any:
        """The program with this number."""
        return dataclasses.replace(self._source.draw(mesh, seed), marks=())

    def run(self, layout: Any, mesh: Mesh | None) -> list[Any]:
        """The program's results; on the CPU without a mesh. Runs what is pending."""
        if mesh is None:
            return self._source.run(layout, None)
        spmd.sync()
        before, chosen = automatic.search, _Chosen(mesh, random.Random(layout.seed))
        with lock:
            automatic.search = chosen
        try:
            results = self._source.run(layout, mesh)
            spmd.sync()
        finally:
            with lock:
                automatic.search = before
        return results

    def is_as_good(self, layout: Any, got: list[Any], expected: list[Any]) -> bool:
        """See `examination.Source`."""
        return self._source.is_as_good(layout, got, expected)


class _Chosen:
    """Gives a program the shardings of one of its candidates; `automatic.search` meanwhile."""

    folds_layers = False

    def __init__(self, mesh: Mesh, rng: random.Random) -> None:
        self._mesh, self._rng = mesh, rng

    def __call__(
        self,
        plan: Callable[[], CutPlan],
        complete: Callable[[CutPlan], CutPlan],
        one_by_one: Callable[[], CutPlan],
    ) -> CutPlan:
        planned = complete(plan())
        groups = group(read_step(planned.graph()))
        machine = dataclasses.replace(Machine.of(present().devices), latency_s=0.0)
        inputs = inputs_of(groups, tensor_names.names())
        found = candidates(groups, machine, inputs, mesh=self._mesh, memory=None)
        return sharded(planned, shardings(groups, self._rng.choice(found).solution, self._mesh))

    def ready(self, live: list[Storage], wanted: Storage | None) -> list[Storage]:
        return live

    def waits(self, value: Value) -> bool:
        return False
