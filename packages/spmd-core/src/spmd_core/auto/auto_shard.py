"""`auto_shard`: finds the shardings of a step, and applies them as marks."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.auto.costs import CostModel
from spmd_core.auto.explained import Explainer
from spmd_core.auto.groups import Groups, group
from spmd_core.auto.machine import Machine
from spmd_core.auto.measure import measured
from spmd_core.auto.read_step import read_step
from spmd_core.auto.recorded_step import RecordedStep, record
from spmd_core.auto.searches import searched
from spmd_core.auto.sharding_plan import Row, ShardingPlan, mark_result
from spmd_core.auto.tried import Progress, Tried
from spmd_core.errors import AutoShardingError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.marks.marking import mark_sharding
from spmd_core.planner.topology import Topology, find_topology, present
from spmd_core.program import leaves, tensor_names
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

OBJECTIVES = ("time", "memory", "measured")
ON_INTERRUPT = ("raise", "best")


@checked(memory=1, candidates=0)
def auto_shard(
    step_or_model: Callable[..., Any] | nn.Module,
    *example: Any,
    mesh: Mesh | None = None,
    topology: str | Topology | None = None,
    memory: int | None = None,
    objective: str = "time",
    candidates: int = 4,
    on_interrupt: str = "raise",
    report: Callable[[str], None] | None = None,
) -> ShardingPlan:
    """Finds the mesh and the shardings of a training step, and applies them as marks.

    The step is called once and recorded, and nothing of it runs; what it changed on the device, in
    gradients, optimizers, schedulers and torch's random generator is taken back. From the rules of
    its operations an integer program finds the shardings of least modelled time for each shape of
    a mesh; the best candidates are compiled, and the compiler's memory, collectives and FLOPs
    decide. Parameters, state and example inputs are then marked by `mark_sharding`, and the results
    of modules by hooks that call it, so the programs that decide are those that the loop runs.
    Marks that are there already stay and are constraints of the search. Deterministic, unless times
    are measured. Waits for compilations, and for devices only to measure.

    Args:
        step_or_model: a function that computes a loss, calls `backward()` and the optimizer's
            `step()`, all on device `xla`; `sync()` at its end is fine. Or a model: in training mode
            a forward, a backward from the sum of its first result and a step of AdamW are recorded,
            else a forward.
        *example: its arguments, as in the training loop.
        mesh: the mesh; by default the mesh of the marks that are there, else the best of all shapes
            with at most three axes over all devices.
        topology: devices that need not exist, such as "v5p-128" (see `plan`). The plan is then for
            them, and nothing is marked.
        memory: the bytes of one device; by default those of the chip, and no limit on CPUs.
        objective: "time" for the least time by the model and the compiled programs, and of equal
            times the least memory; "memory" for the least memory; or "measured" for the least time
            on the devices: the programs of the compiled candidates run up to 48 times each, on
            copies of the step's inputs.
        candidates: how many candidates to compile at most; 0 to trust the model. To be measured, up
            to two of them are compiled in a second form, with marks of modules' results.
        on_interrupt: what Ctrl-C does during the search. "raise": KeyboardInterrupt, and nothing
            has changed. "best": the search ends with the best so far: of the candidates that were
            compiled, or by the model if none was; before there is one, it raises as well.
        report: called with a line of text about what is being done.

    Returns:
        The plan: `table()`, `code()`, `explain(name)`, `save(path)`.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        AutoShardingError: the step reads a value on the host or computes nothing, marks contradict
            each other, or no sharding fits the memory.
        PlanError: there is no such topology.

    Example:
        >>> model = nn.Linear(512, 512, device="xla")
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> def step(x):
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> plan = auto_shard(step, torch.ones(64, 512, device="xla"), candidates=0)
        >>> plan.mesh.size()
        8
    """
    devices.require_spmd("auto_shard")
    require_kind("mesh", mesh, Mesh, type(None), write="for instance mesh=Mesh(range(8), (8,))")
    most = require_int("candidates", candidates, least=0)
    for name, given, known in (
        ("objective", objective, OBJECTIVES),
        ("on_interrupt", on_interrupt, ON_INTERRUPT),
    ):
        if given not in known:
            raise AutoShardingError(
                f"{name} is one of {', '.join(known)}; got {given!r}. Write {name}={known[0]!r}."
            )
    found = _topology(topology)
    arguments = pytree.tree_map_only(torch.Tensor, lambda x: x.to("xla"), example)
    step = _step_of(step_or_model, arguments)
    if objective == "measured":
        _require_measurable(most, topology)

    def search(recorded: RecordedStep) -> tuple[RecordedStep, Groups, list[Tried]]:
        groups = group(read_step(recorded.graph))
        limit, progress = memory or found.hbm_bytes, Progress()
        if objective == "measured":
            progress.programs = {}
        tell = report or (lambda text: None)

        def measure(tried: list[Tried]) -> list[Tried]:
            made = progress.programs or {}
            return measured(recorded, tried, made=made, memory=limit, report=tell)

        try:
            tried = searched(
                groups,
                found,
                mesh=mesh or marked_mesh(groups),
                memory=limit,
                most=most,
                objective=objective,
                names=recorded.names,
                markable=recorded.markable,
                report=tell,
                progress=progress,
                measure=measure if objective == "measured" else None,
            )
        except KeyboardInterrupt:
            tried = progress.best_first(memory=limit, objective=objective)
            if on_interrupt != "best" or not tried:
                raise
        return recorded, groups, tried

    recorded, groups, tried = record(step, search)
    plan = plan_of(recorded, groups, tried, Machine.of(found.devices))
    if topology is None:
        _apply(plan, recorded, groups, tried[0])
    return plan


def _topology(given: str | Topology | None) -> Topology:
    if isinstance(given, Topology):
        return given
    if given is not None:
        return find_topology(given)
    return present()


def _require_measurable(candidates: int, topology: Any) -> None:
    """Raises AutoShardingError if candidates are not compiled, or for devices that are absent."""
    if topology is not None:
        raise AutoShardingError(
            'objective="measured" runs programs, so the devices must be here; got topology='
            f'{topology!r}. Write objective="time", or leave the topology out.'
        )
    if not candidates:
        raise AutoShardingError(
            'objective="measured" runs the candidates that are compiled; got candidates=0. Write '
            "candidates=4."
        )


def _step_of(given: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """The function to record: the user's step, or a step of the model."""
    if not isinstance(given, nn.Module):
        if not callable(given):
            raise AutoShardingError(
                "auto_shard takes a function or a module; got an object of type "
                f"{type(given).__name__}. Give the function that runs one training step."
            )
        return lambda: given(*arguments)
    model = given
    if not model.training:

        def forward() -> Any:
            with torch.no_grad():
                return model(*arguments)

        return forward
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def train() -> Any:
        result = model(*arguments)
        loss = getattr(result, "loss", None)
        if loss is None:
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            loss = next(x for x in tensors if x.is_floating_point()).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def marked_mesh(groups: Groups) -> Mesh | None:
    """The mesh of the user's marks and manual regions; None if there are none.

    Raises:
        AutoShardingError: they have different meshes.
    """
    step = groups.step
    meshes = {x.fixed.mesh for x in step.tensors if x.fixed is not None}
    meshes |= {x.manual.mesh for x in step.operations if x.manual is not None}
    if len(meshes) > 1:
        raise AutoShardingError(
            "marks and manual regions that are there before automatic sharding must share one "
            f"mesh; got {', '.join(sorted(map(repr, meshes)))}. Write them over one mesh."
        )
    return meshes.pop() if meshes else None


def plan_of(
    recorded: RecordedStep, groups: Groups, tried: list[Tried], machine: Machine
) -> ShardingPlan:
    """The plan of the first of these candidates."""
    best = tried[0]
    step = groups.step
    names: dict[str, int] = {}
    numbers = itertools.count()
    for i, leaf in enumerate(recorded.leaves):
        if not step.tensors[i].spec.shape:
            continue
        for storage in recorded.rows.get(i, (leaf,)):
            name = None if storage is None else recorded.names.get(storage)
            names[name or f"input {next(numbers)}"] = i
    axes = best.shardings.mesh.axis_names or tuple(
        str(i) for i in range(len(best.candidate.mesh_shape))
    )
    explainer = Explainer(
        CostModel(groups, best.candidate.mesh_shape, machine, best.shardings.mesh.ids),
        machine,
        best.candidate.solution,
        axes,
        names,
    )
    rows, marked = {}, _with_marked_gradients(groups, best)
    for name, i in names.items():
        shape, num_bytes = step.tensors[i].spec.shape, _bytes(best, i, groups)
        spec = best.shardings.leaves[i].partition_spec
        if i in recorded.rows:  # a stack, whose first dim no device splits
            num_bytes, shape, spec = num_bytes // shape[0], shape[1:], tuple(spec)[1:]
        rows[name] = Row(name, shape, spec, num_bytes, explainer.reason(i), i in marked)
    parameters = [x for name, x in rows.items() if "." in name and " of " not in name]
    inputs = [x for name, x in rows.items() if name.startswith("input ")]
    return ShardingPlan(
        best.shardings.mesh,
        tuple(parameters),
        tuple(inputs),
        _activations(recorded, best),
        tuple(tried),
        explainer,
    )


def _bytes(best: Tried, leaf: int, groups: Groups) -> int:
    spec, sharding = groups.step.tensors[leaf].spec, best.shardings.leaves[leaf]
    count = 1
    for n in sharding.shard_shape(spec.shape):
        count *= n
    return count * spec.dtype.itemsize


def _activations(recorded: RecordedStep, best: Tried) -> dict[str, Any]:
    """The partition specs of the modules' results that are marked, by the module's name."""
    marks = dict(best.shardings.marks)
    found = {}
    for module, path in recorded.paths.items():
        sharding = marks.get(recorded.calls[module][0].result)
        if sharding is not None:
            found[path] = sharding.partition_spec
    return found


def _apply(plan: ShardingPlan, recorded: RecordedStep, groups: Groups, best: Tried) -> None:
    """Marks the tensors of the step, and the results of its modules from now on."""
    tensors, marked = tensor_names.parameters(), _with_marked_gradients(groups, best)
    for i, (storage, sharding) in enumerate(zip(recorded.leaves, best.shardings.leaves)):
        if storage is None or not sharding.ndim or storage.sharding is not None:
            continue
        tensor = tensors.get(storage)
        # A mark on a whole parameter would keep its gradient from being reduced with others: only
        # where these would be summed in the narrower dtype of a product.
        is_needed = not sharding.is_replicated or i in marked
        if isinstance(tensor, XLAShardedTensor) and is_needed:
            mark_sharding(tensor, sharding.mesh, sharding.partition_spec)
        elif _is_state(recorded, storage) or not sharding.is_replicated:
            with lock:
                leaves.set_sharding(storage, sharding)
    for module, path in recorded.paths.items():
        if path in plan.activations:
            mark_result(module, plan.mesh, plan.activations[path])


def _with_marked_gradients(groups: Groups, best: Tried) -> set[int]:
    """The leaves whose gradients are marked: of split parameters, and of some that are whole."""
    of = {groups.of_tensor[t] for t in best.shardings.gradients}
    return {i for i in groups.step.updated if groups.of_tensor[i] in of}


def _is_state(recorded: RecordedStep, storage: Storage) -> bool:
    return storage in recorded.names
