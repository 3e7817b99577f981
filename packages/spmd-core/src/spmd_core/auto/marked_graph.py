"""A recorded graph with the shardings of a choice: inputs, results, activations, gradients."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spmd_core.auto.costs import NONE
from spmd_core.auto.groups import Groups
from spmd_core.auto.solve import Solution
from spmd_core.auto.step_graph import updated
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry
from spmd_core.marks.constraints import mark_entry
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.leaves import marked_placement
from spmd_core.program.mark_names import MARK, MARK_SHARDING
from spmd_core.program.program_graph import Node, RecordedGraph
from spmd_core.runtime.jax_sharding import jax_axis_names, replicated
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding


@dataclass(frozen=True)
class Shardings:
    """The shardings of a step's tensors over a mesh, as a solution chose them.

    Attributes:
        mesh: the mesh.
        leaves: for each graph input its sharding.
        marks: the tensors inside of the step that are marked, by their positions, with shardings.
        gradients: those of `marks` that are gradients of parameters.
    """

    mesh: Mesh
    leaves: tuple[Sharding, ...]
    marks: tuple[tuple[int, Sharding], ...]
    gradients: frozenset[int]

    def placements(self) -> list[Placement]:
        """Where each graph input lies."""
        whole = Placement.of(replicated(self.mesh.ids), None)
        return [marked_placement(s) if s.ndim else whole for s in self.leaves]

    @property
    def mesh_text(self) -> str:
        """The mesh as `fsdp=4,tensor=2`."""
        names = jax_axis_names(self.mesh)
        return ",".join(f"{name}={n}" for name, n in zip(names, self.mesh.mesh_shape))


def sharding_of(groups: Groups, solution: Solution, mesh: Mesh, tensor: int) -> Sharding:
    """The sharding that a solution gives a tensor."""
    tie = groups.tie[groups.of_tensor[tensor]]
    spec: list[tuple[int, ...]] = [() for _ in groups.step.tensors[tensor].spec.shape]
    for axis, choice in enumerate(solution.choices):
        dim = None if choice[tie] == NONE else groups.dim_of(tensor, choice[tie])
        if dim is not None:
            spec[dim] = (*spec[dim], axis)
    return Sharding.of(mesh, tuple(spec), len(spec))


def shardings(groups: Groups, solution: Solution, mesh: Mesh) -> Shardings:
    """The shardings that a solution gives the tensors of a step."""
    step = groups.step

    def sharding(tensor: int) -> Sharding:
        return sharding_of(groups, solution, mesh, tensor)

    leaves = tuple(sharding(t) for t, x in enumerate(step.tensors) if x.leaf is not None)
    marks, gradients = {}, set()
    of_state = {groups.of_tensor[leaf] for leaf in step.updated}
    for tensor in _heavy_results(groups):
        group = groups.of_tensor[tensor]
        if group in of_state:
            tensor = _as_updated(groups, tensor)
            gradients.add(tensor)
        marks[tensor] = sharding(tensor)
    return Shardings(mesh, leaves, tuple(sorted(marks.items())), frozenset(gradients))


def _heavy_results(groups: Groups) -> list[int]:
    """The results of products, sums and lookups that have dims."""
    step = groups.step
    return [
        t
        for operation in step.operations
        if not operation.is_light
        for t, _ in operation.results
        if step.tensors[t].spec.num_elements > 1
    ]


def _as_updated(groups: Groups, tensor: int) -> int:
    """A gradient in the form in which it is read: the last of the views that follow on it."""
    step = groups.step
    while True:
        readers = step.readers[tensor]
        if len(readers) != 1:
            return tensor
        operation = step.operations[readers[0]]
        if operation.entry.traits.elements > Elements.PERMUTED or len(operation.results) != 1:
            return tensor
        tensor = operation.results[0][0]


def marked(recorded: RecordedGraph, found: Shardings) -> RecordedGraph:
    """The graph whose inputs, results and marks have these shardings; it computes the same.

    A result that replaces an input is placed like it. Other results stay where the partitioner
    puts them; one without dims is replicated.
    """
    ids, marks = found.mesh.ids, dict(found.marks)
    placements = found.placements()
    leaves = tuple(
        replace(leaf, placement=placement) for leaf, placement in zip(recorded.leaves, placements)
    )
    num_leaves = len(leaves)
    nodes: list[Node] = []
    number: dict[int, int] = {-i - 1: -i - 1 for i in range(num_leaves)}
    before = count = 0
    for node in recorded.nodes:
        nodes.append(Node(node.entry, tuple(number[n] for n in node.inputs), node.origin))
        for i in range(len(node.entry.outs)):
            number[before + i] = count + i
        count += len(node.entry.outs)
        for i, spec in enumerate(node.entry.outs):
            tensor = num_leaves + before + i
            if tensor in marks:
                summed = () if tensor in found.gradients else None
                name = MARK_SHARDING if summed is None else MARK
                entry = mark_entry(spec, marks[tensor], name, summed_over=summed)
                nodes.append(Node(entry, (number[before + i],), node.origin))
                number[before + i] = count
                count += 1
        before += len(node.entry.outs)
    replaced = {output: leaf for leaf, output in updated(recorded).items()}
    outputs = []
    for i, output in enumerate(recorded.outputs):
        placement = output.placement
        if i in replaced:
            placement = placements[replaced[i]]
        elif placement is not None or not output.spec.shape:
            placement = Placement.of(replicated(ids), None)
        outputs.append(replace(output, value=number[output.value], placement=placement))
    return replace(
        recorded, leaves=leaves, nodes=tuple(nodes), outputs=tuple(outputs), device_ids=ids
    )


def positions(entries: Iterable[Entry], num_leaves: int, found: Shardings) -> tuple[int, ...]:
    """For each operation of the graph that `marked` makes, the position of the one before.

    Args:
        entries: those of the operations of the graph that is marked.
        num_leaves: the number of its inputs.
        found: the shardings.
    """
    marks = dict(found.marks)
    places: list[int] = []
    tensor = num_leaves
    for position, entry in enumerate(entries):
        after = tensor + len(entry.outs)
        places += [position] * (1 + sum(t in marks for t in range(tensor, after)))
        tensor = after
    return tuple(places)
