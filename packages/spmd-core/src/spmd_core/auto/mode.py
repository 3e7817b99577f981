"""Automatic sharding of whatever runs: each new program is searched before it is compiled."""

import functools
import logging
import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace

from spmd_core.auto.auto_shard import marked_mesh, plan_of
from spmd_core.auto.candidates import Kind
from spmd_core.auto.groups import group
from spmd_core.auto.machine import Machine
from spmd_core.auto.marked_graph import Shardings, marked, positions
from spmd_core.auto.planned_shardings import of_same_program
from spmd_core.auto.read_step import read_step
from spmd_core.auto.recorded_step import RecordedStep, why_not
from spmd_core.auto.searches import searched
from spmd_core.auto.step_graph import updated
from spmd_core.auto.waiting_draws import WaitingDraws, as_inputs, draw
from spmd_core.errors import AutoShardingError
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import Stack, row_sharding
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.metrics.flops import entry_flops
from spmd_core.planner.planned import FoundShardings
from spmd_core.planner.topology import Topology, present
from spmd_core.program import automatic, folding, leaves, planning, tensor_names
from spmd_core.program.cut_guard import this_thread
from spmd_core.program.planning import CutPlan, collect
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime import abstract
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding

_log = logging.getLogger(__name__)
# How many candidates are compiled for the first program; later ones keep its mesh and shardings,
# and take the best by the model of what was asked for where the first one's was found.
_MOST_COMPILED = 4
_MOST_KNOWN = 256


class Automatic:
    """Gives programs the shardings that a search finds; `automatic.search` while the mode is on.

    The first program with a product is searched, and its inputs that stay, parameters and state,
    are marked: later searches take these marks as given. Programs without products, such as those
    that draw the weights, run as they are, and so do, with a warning, those that read what is not
    a whole tensor (`why_not`).

    Attributes:
        mesh: the mesh of all plans, or the shape that it shall have, () for any, until the first
            search.
        topology: the devices of the plan for which this was turned on; None for programs that run.
        found: of such a plan, what each search has found.
        folds_layers: whether repeated layers become loops, by the shardings of the first search.
    """

    def __init__(
        self,
        mesh: Mesh | tuple[int, ...],
        topology: Topology | None = None,
        found: list[FoundShardings] | None = None,
    ) -> None:
        self.mesh, self.topology = mesh, topology
        self.found: list[FoundShardings] = [] if found is None else found
        self.folds_layers = False
        # What searches have found, by the programs that they read, with layers one by one; and for
        # programs that run, whose layers may lie in stacks.
        self._known: dict[Hashable, Shardings | None] = {}
        self._of_plans: dict[Hashable, Shardings | None] = {}
        self._warned: set[str] = set()
        self._kind: Kind | None = None  # of the first search's candidate
        self._draws: WaitingDraws | None = WaitingDraws()  # until the first search

    def __call__(
        self,
        plan: Callable[[], CutPlan],
        complete: Callable[[CutPlan], CutPlan],
        one_by_one: Callable[[], CutPlan],
    ) -> CutPlan:
        """The plan that `plan()` makes, with the shardings of a search (see `automatic.Search`)."""
        planned = plan()
        if not self._is_here():
            return planned
        refused = why_not(planned)
        if refused is not None:
            if any(entry_flops(node.entry) for node in planned.nodes):
                self._warn(refused)
            return planned
        if _key(planned) not in self._of_plans:
            planned = complete(planned)
        key = _key(planned)
        if key in self._of_plans:
            found = self._of_plans[key]
        else:
            found = self._found(one_by_one)
            if found is not None:
                planned = complete(plan())
                found = of_same_program(found, one_by_one(), planned)
            if self._draws is None:  # else this plan is not run, and has no stacks yet
                _keep(self._of_plans, _key(planned), found)
        return planned if found is None else sharded(planned, found)

    def _found(self, one_by_one: Callable[[], CutPlan]) -> Shardings | None:
        """The shardings of a program, whose tensors are marked then; None if it stays as it is.

        Args:
            one_by_one: makes its plan with layers one by one.
        """
        planned = one_by_one()
        key = _key(planned)
        if key not in self._known:
            found = self._search(planned)
            if found is not None:
                _mark(planned, found)
                key = _key(one_by_one())
            _keep(self._known, key, found)
        return self._known[key]

    def ready(self, live: list[Storage], wanted: Storage | None) -> list[Storage]:
        """See `automatic.Search`: draws before the first search wait for it."""
        if self._draws is None or not self._is_here():
            return live
        guard = this_thread.cut_guard
        if not any(entry_flops(node.entry) for node in collect(live)[0]):
            return live if guard is not None else self._draws.keep_back(live, wanted)
        draws = self._draws.pending()
        if draws:
            rest = [storage for storage in live if storage.value not in draws]
            with as_inputs(draws):  # this plan is not run: the search marks the storages
                planning.plan(rest, call=None if guard is None else guard.call())
            draw(draws)
        self._draws = None
        return [storage for storage in live if storage.value.data is None]

    def waits(self, value: Value) -> bool:
        """See `automatic.Search`: draws do, until the first search."""
        return self._draws is not None and value in self._draws

    def _is_here(self) -> bool:
        """Whether programs are now those that this is about: of a plan, or those that run."""
        return (abstract.run() is not None) == (self.topology is not None)

    def _warn(self, refused: str) -> None:
        """Says, once for each reason, that programs with products are not searched."""
        if refused not in self._warned:
            self._warned.add(refused)
            warnings.warn(
                "automatic sharding splits whole tensors, and leaves programs that read "
                f"{refused} as their marks say. Shard these by hand.",
                stacklevel=2,
            )

    def _search(self, planned: CutPlan) -> Shardings | None:
        """The shardings of a new program; None if it stays as it is."""
        graph = replace(planned.graph(), fold_layers=False)  # candidates decide (`LoopedStep`)
        if not any(entry_flops(node.entry) for node in graph.nodes):
            return None
        _log.info("searching shardings for %s", planned.name)
        groups = group(read_step(graph))
        devices = self.topology or present()
        given = self._given(len(devices.devices))
        is_first = not isinstance(self.mesh, Mesh) or not self._known
        names = tensor_names.names()
        tried = searched(
            groups,
            devices,
            mesh=marked_mesh(groups) or given,
            memory=devices.hbm_bytes,
            most=_MOST_COMPILED if is_first else 0,
            objective="time",
            names=names,
            report=_log.info,
        )
        if is_first:
            self._kind = tried[0].candidate.kind
            self.folds_layers = folding.folds_placed(marked(graph, tried[0].shardings).leaves)
        else:
            tried = sorted(tried, key=lambda x: x.candidate.kind is not self._kind)
        self.mesh = tried[0].shardings.mesh
        if self.topology is not None:
            owners = tuple(None if leaf.owner is None else leaf.owner() for leaf in graph.leaves)
            stacks = _stacks(planned)
            rows = {
                i: [storage for storage in stacks[leaf].storages() if storage is not None]
                for i, leaf in enumerate(planned.leaves)
                if leaf in stacks
            }
            recorded = RecordedStep(graph, names, leaves=owners, rows=rows)
            made = plan_of(recorded, groups, tried, Machine.of(devices.devices))
            text = f"{made.table()}\n\n{made.code()}"
            self.found.append(FoundShardings(tried[0].shardings.mesh_text, text))
        return tried[0].shardings

    def _given(self, num_devices: int) -> Mesh | None:
        if isinstance(self.mesh, Mesh):
            return self.mesh
        if not self.mesh:
            return None
        if math.prod(self.mesh) != num_devices:
            raise AutoShardingError(
                f"the mesh of automatic sharding has all {num_devices} devices; got one of shape "
                f"{self.mesh}. Give sizes whose product is {num_devices}, or none."
            )
        return Mesh(range(num_devices), self.mesh)


def _key(planned: CutPlan) -> Hashable:
    """What decides a search: the operations, and the marks of inputs."""
    owners = (None if leaf.owner is None else leaf.owner() for leaf in planned.leaves)
    marks = (
        leaf.placement.sharding if owner is None else owner.sharding
        for leaf, owner in zip(planned.leaves, owners)
    )
    return planned.key.structure, tuple(marks)


def _keep(known: dict[Hashable, Shardings | None], key: Hashable, found: Shardings | None) -> None:
    """Keeps what was found, and of too many programs the later ones."""
    if len(known) >= _MOST_KNOWN:
        known.pop(next(iter(known)))
    known[key] = found


def _mark(planned: CutPlan, found: Shardings) -> None:
    """Marks the program's parameters and state; inputs that come anew with each step stay free."""
    graph = planned.graph()
    names = tensor_names.names()
    state = updated(graph)
    stacks = _stacks(planned)
    for i, (leaf, sharding) in enumerate(zip(planned.leaves, found.leaves)):
        own: Sharding | None = sharding
        storages = [None if leaf.owner is None else leaf.owner()]
        if leaf in stacks:
            own, storages = row_sharding(sharding), stacks[leaf].storages()
        if own is None or not own.ndim:
            continue
        for storage in storages:
            if (
                storage is not None
                and storage.sharding is None
                and (i in state or storage in names)
            ):
                _mark_storage(storage, own)


def _stacks(planned: CutPlan) -> dict[Value, Stack]:
    """The stacks among the inputs of a program."""
    return {stack.value: stack for stack, _ in planned.stacked.rows.values()}


def _mark_storage(storage: Storage, sharding: Sharding) -> None:
    leaves.set_sharding(storage, sharding)
    before = storage.committed
    if before is not None and before is not storage.value:  # an update is pending
        if before.placement.jax_sharding is None:
            before.placement = leaves.host_placement(sharding)
        else:
            leaves.move(before, leaves.marked_placement(sharding))


def sharded(planned: CutPlan, found: Shardings) -> CutPlan:
    """A plan of the same program with these shardings."""
    placements = tuple(found.placements())
    kept = tuple(i for i in planned.key.donated if planned.targets[i] is placements[i])
    key = planned.key._replace(
        leaves=tuple((leaf.spec.logical, p) for leaf, p in zip(planned.leaves, placements)),
        donated=kept,
        device_ids=found.mesh.ids,
        found=found,
    )
    rewrite: Callable[[RecordedGraph], RecordedGraph] = functools.partial(marked, found=found)
    places = positions((node.entry for node in planned.nodes), len(planned.leaves), found)
    return replace(planned, key=key, targets=placements, rewrite=rewrite, positions=places)


def start(
    mesh: Mesh | tuple[int, ...] = (),
    topology: Topology | None = None,
    found: list[FoundShardings] | None = None,
) -> None:
    """Turns automatic sharding on for programs that are compiled from now on.

    Args:
        mesh: the mesh to use, or its shape; () to choose one at the first program with a product.
        topology: the devices of the plan whose programs these are; None for programs that run.
        found: of such a plan, gets what is found for each program that is searched.
    """
    with lock:
        automatic.search = Automatic(mesh, topology, found)
