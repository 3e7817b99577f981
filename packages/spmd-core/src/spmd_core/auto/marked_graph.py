"""A recorded graph with the shardings of a choice: inputs, results, activations, gradients."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spmd_core.auto.costs import NONE
from spmd_core.auto.groups import Groups
from spmd_core.auto.marked_loops import by_loop, mark, with_marks
from spmd_core.auto.recorded_step import Markable
from spmd_core.auto.solve import Solution
from spmd_core.auto.step_graph import Place, updated
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry
from spmd_core.program.leaves import marked_placement
from spmd_core.program.program_graph import Node, RecordedGraph
from spmd_core.program.regions import of_results
from spmd_core.runtime.jax_sharding import jax_axis_names, replicated
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Phase


class Read(NamedTuple):
    """A tensor that is marked where it is read.

    Attributes:
        uses: who reads what the mark makes: positions of recorded nodes and of their operands.
        sharding: of the mark.
    """

    uses: tuple[tuple[int, int], ...]
    sharding: Sharding


@dataclass(frozen=True)
class Shardings:
    """The shardings of a step's tensors over a mesh, as a solution chose them.

    Attributes:
        mesh: the mesh.
        leaves: for each graph input its sharding.
        marks: the tensors inside of the step that are marked, by their positions, with shardings.
        gradients: those of `marks` that are gradients of parameters.
        summed_over: for some of these the axes over which devices have parts of their sums, those
            that split the batch; for others they follow from how the inputs are split.
        in_loops: marks inside of loops' bodies: where each is, its sharding, and whether it is of a
            gradient of a parameter.
        reads: what is marked where it is read, in another layout than it has.
        unmarked: the graph inputs that lie whole without a mark, besides tensors without dims:
            stacks of such tensors.
    """

    mesh: Mesh
    leaves: tuple[Sharding, ...]
    marks: tuple[tuple[int, Sharding], ...]
    gradients: frozenset[int]
    in_loops: tuple[tuple[Place, Sharding, bool], ...] = ()
    reads: tuple[Read, ...] = ()
    summed_over: tuple[tuple[int, tuple[int, ...]], ...] = ()
    unmarked: frozenset[int] = frozenset()

    def placements(self) -> list[Placement]:
        """Where each graph input lies."""
        whole = Placement.of(replicated(self.mesh.ids), None)
        return [
            marked_placement(sharding) if sharding.ndim and i not in self.unmarked else whole
            for i, sharding in enumerate(self.leaves)
        ]

    def without_results(self) -> "Shardings":
        """These, with marks of gradients alone."""
        return replace(
            self,
            marks=tuple(x for x in self.marks if x[0] in self.gradients),
            in_loops=tuple(x for x in self.in_loops if x[2]),
        )

    @property
    def marks_results(self) -> bool:
        """Whether more than gradients is marked."""
        return len(self.marks) > len(self.gradients) or not all(x[2] for x in self.in_loops)

    @property
    def mesh_text(self) -> str:
        """The mesh as `fsdp=4,tensor=2`."""
        names = jax_axis_names(self.mesh)
        return ",".join(f"{name}={n}" for name, n in zip(names, self.mesh.mesh_shape))


# Makes a sharding of the axes that split each dim.
_OfDims = Callable[[tuple[tuple[int, ...], ...]], Sharding]


def _sharding_of(groups: Groups, solution: Solution, of_dims: _OfDims, tensor: int) -> Sharding:
    """The sharding that a solution gives a tensor."""
    tie = groups.tie[groups.of_tensor[tensor]]
    spec: list[tuple[int, ...]] = [() for _ in groups.step.tensors[tensor].spec.shape]
    for axis in solution.order[tie]:
        choice = solution.choices[axis]
        dim = None if choice[tie] == NONE else groups.dim_of(tensor, choice[tie])
        if dim is not None:
            spec[dim] = (*spec[dim], axis)
    return of_dims(tuple(spec))


def shardings(
    groups: Groups, solution: Solution, mesh: Mesh, markable: Markable | None = None
) -> Shardings:
    """The shardings that a solution gives the tensors of a step.

    Args:
        groups: the step.
        solution: what it chose.
        mesh: the mesh.
        markable: the tensors inside of the step that may be marked; None for all.
    """
    of_dims = functools.cache(functools.partial(Sharding.of_dims, mesh))  # there are few

    def sharding(tensor: int) -> Sharding:
        return _sharding_of(groups, solution, of_dims, tensor)

    leaves = [sharding(t) for t, x in enumerate(groups.step.tensors) if x.leaf is not None]
    reads: tuple[Read, ...] = ()
    over: dict[int, tuple[int, ...]] = {}
    if markable is None:
        marks, gradients, over = _anywhere(groups, solution, sharding)
        reads = tuple(_reads(groups, solution, of_dims))
    else:
        for alike in markable.alike:
            ((most_common, _),) = Counter(leaves[i] for i in alike).most_common(1)
            for i in alike:
                leaves[i] = most_common
        marks, gradients = _in_code(groups, solution, sharding, markable, leaves)
    places = groups.step.places
    return Shardings(
        mesh,
        tuple(leaves),
        tuple(sorted((t, x) for t, x in marks.items() if t not in places)),
        frozenset(gradients.difference(places)),
        tuple(sorted((places[t], x, t in gradients) for t, x in marks.items() if t in places)),
        reads,
        tuple(sorted((t, axes) for t, axes in over.items() if axes and t not in places)),
        groups.step.stacks_of_numbers,
    )


_Marks = tuple[dict[int, Sharding], set[int]]


def _in_code(
    groups: Groups,
    solution: Solution,
    sharding: Callable[[int], Sharding],
    markable: Markable,
    leaves: Sequence[Sharding],
) -> _Marks:
    """The marks that parameters and modules' results make in a program, and the gradients."""
    step = groups.step
    marks: dict[int, Sharding] = {}
    for gradient, leaf in markable.gradients:
        is_needed = not leaves[leaf].is_replicated or _is_cast(groups, gradient)
        if step.tensors[leaf].fixed is None and is_needed:
            marks[gradient] = leaves[leaf]
    gradients = set(marks)
    needed = set(_to_mark(groups, solution))
    for calls in markable.calls:
        of_calls = {sharding(call.result) for call in calls}
        if len(of_calls) > 1 or not any(
            not needed.isdisjoint(_held(groups, call.result)) for call in calls
        ):
            continue  # one hook marks all calls alike
        (of_result,) = of_calls
        if of_result.is_replicated:
            continue
        for call in calls:
            for tensor in (call.result, call.gradient):
                if tensor is not None and tensor not in gradients:
                    marks[tensor] = of_result
    return marks, gradients


def _is_cast(groups: Groups, gradient: int) -> bool:
    """Whether a gradient has another dtype than the product or sum that computes it.

    Without a mark the partitioner sums it over the devices in the dtype of the product, which is
    bfloat16 under autocast. With one it is summed in its own.
    """
    tensors = groups.step.tensors
    own = tensors[gradient].spec.dtype
    return any(tensors[t].spec.dtype != own for t in _held(groups, gradient))


def _held(groups: Groups, tensor: int) -> Iterator[int]:
    """A tensor, and those of as many elements of which light operations have made it."""
    step = groups.step
    found: int | None = tensor
    while found is not None:
        yield found
        maker = step.makers[found]
        if maker is None or not step.operations[maker].is_light:
            return
        size = step.tensors[found].spec.num_elements
        operands = (t for t, _ in step.operations[maker].operands)
        found = next((t for t in operands if step.tensors[t].spec.num_elements == size), None)


def _anywhere(
    groups: Groups, solution: Solution, sharding: Callable[[int], Sharding]
) -> tuple[dict[int, Sharding], set[int], dict[int, tuple[int, ...]]]:
    """Marks wherever the partitioner has a choice; the gradients of parameters, and their axes.

    Those are the axes over which devices have parts of a sum, where they are known.
    """
    step = groups.step
    marks, gradients = {}, set()
    over: dict[int, tuple[int, ...]] = {}
    for tensor in _to_mark(groups, solution):
        if step.tensors[tensor].spec.num_elements == 1 or step.tensors[tensor].manual is not None:
            continue
        if groups.of_tensor[tensor] in groups.of_state and _is_heavy_result(groups, tensor):
            # Of a weight that is read twice, as an embedding's by the logits, each device adds its
            # parts of both gradients before these are summed over the devices.
            made, axes = step.tensors[tensor].spec.dtype, _summed_over(groups, solution, tensor)
            tensor, is_sum = step.totals[tensor]
            is_cast = step.tensors[tensor].spec.dtype != made
            if sharding(tensor).is_replicated and not is_sum and not is_cast:
                continue  # as the parameter is: there is one way to sum it
            gradients.add(tensor)
            over[tensor] = axes if over.get(tensor, axes) == axes else ()
        elif _is_summed_for_state(groups, solution, tensor):
            # Of a whole total XLA adds up the devices' parts before it reduces them over the
            # devices, also behind casts. Of a split one it reduces each part that is cast.
            summed_over = _partial_axes(groups, solution, tensor)
            tensor, _ = step.totals[tensor]
            marks[tensor] = _without(sharding(tensor), summed_over)
            continue
        marks[tensor] = sharding(tensor)
    return marks, gradients, over


def _summed_over(groups: Groups, solution: Solution, tensor: int) -> tuple[int, ...]:
    """The axes over which devices have parts of the sums that a product or the like makes.

    In the order in which they split its first operand; none if they split several of its factors,
    such as batch and sequence.
    """
    step, found = groups.step, _partial_axes(groups, solution, tensor)
    number = step.makers[tensor]
    if number is None or len(set(found.values())) != 1:
        return ()
    first, _ = step.operations[number].operands[0]
    return tuple(x for x in solution.order[groups.tie[groups.of_tensor[first]]] if x in found)


def _is_summed_for_state(groups: Groups, solution: Solution, tensor: int) -> bool:
    """Whether results that devices have parts of are cast and added up for a state's gradient.

    Such are, under autocast, the gradients of a bias that is looked up in a table and read by the
    attention of all layers.
    """
    if not _is_heavy_result(groups, tensor) or not _partial_axes(groups, solution, tensor):
        return False
    step = groups.step
    found, is_sum = step.totals[tensor]
    made = [t for i in step.readers[found] for t, _ in step.operations[i].results]
    is_cast = step.tensors[found].spec.dtype != step.tensors[tensor].spec.dtype
    return (
        is_sum
        and is_cast
        and bool(made)
        and all(groups.of_tensor[t] in groups.of_state for t in made)
    )


def _partial_axes(groups: Groups, solution: Solution, tensor: int) -> dict[int, int]:
    """The axes over which devices have parts of a product or the like, each with what it splits.

    That is a factor of the operation that makes the tensor.
    """
    number = groups.step.makers[tensor]
    assert number is not None
    operation, own = groups.step.operations[number], groups.tie[groups.of_operation[number]]
    position = next(position for t, position in operation.results if t == tensor)
    found: dict[int, int] = {}
    for axis, choice in enumerate(solution.choices):
        factor = groups.factor_of(number, choice[own])
        if factor is not None and operation.partial(position, factor):
            found[axis] = factor
    return found


def _without(sharding: Sharding, axes: Collection[int]) -> Sharding:
    """A sharding whose dims these axes do not split."""
    spec = (tuple(axis for axis in dim if axis not in axes) for dim in sharding.dims)
    return Sharding.of_dims(sharding.mesh, tuple(spec))


def _to_mark(groups: Groups, solution: Solution) -> Iterator[int]:
    """The tensors inside of a step whose shardings the partitioner might choose in another way.

    Those are gradients of parameters, though of whole ones only those that devices would sum in
    another dtype or one by one (`_anywhere`); what an operation reads in another layout than
    it has, as the partitioner would spread the reader's layout to what computes it; and the results
    of products, sums and lookups, unless they follow from operands that agree. More marks would
    only stand between operations that passes and the compiler join.
    """
    step = groups.step
    for i, operation in enumerate(step.operations):
        if operation.is_light:
            continue
        agrees = True
        for t, position in operation.operands:
            if not _is_read_as_held(groups, solution, i, t, operation.rule.operands[position]):
                agrees = False
                if step.makers[t] is not None:
                    yield t
        for t, position in operation.results:
            dims = operation.rule.results[position]
            if (
                not agrees
                or groups.of_tensor[t] in groups.of_state
                or not _is_read_as_held(groups, solution, i, t, dims)
            ):
                yield t


def _is_read_as_held(
    groups: Groups, solution: Solution, number: int, tensor: int, dims: Sequence[tuple[int, ...]]
) -> bool:
    """Whether an operation reads or makes a tensor in the layout that the tensor has."""
    own = groups.tie[groups.of_operation[number]]
    of_tensor = groups.tie[groups.of_tensor[tensor]]
    for choice in solution.choices:
        need = _dim_of(groups, number, choice[own], dims)
        held = None if choice[of_tensor] == NONE else groups.dim_of(tensor, choice[of_tensor])
        if need != held:
            return False
    return True


def _reads(groups: Groups, solution: Solution, of_dims: _OfDims) -> Iterator[Read]:
    """What operations read in another layout than it has.

    Those are the parameters that products gather, as XLA's partitioner, which sees the layouts of
    operands and results alone, may gather activations in their place; and the activations that are
    gathered or exchanged. Where several operations of the forward read one in the same layout, or
    several of the backward, it is moved once for all of these; the partitioner moves it for each.
    """
    step = groups.step
    uses: dict[tuple[int, Sharding, bool], list[tuple[int, int]]] = {}
    for i, operation in enumerate(step.operations):
        if operation.is_light or any(t in step.places for t, _ in operation.results):
            continue  # or inside of a loop
        own = groups.tie[groups.of_operation[i]]
        for t, position in operation.operands:
            if step.tensors[t].manual is not None or t in step.places:
                continue
            tie, is_gathered, is_exchanged = groups.tie[groups.of_tensor[t]], False, False
            spec: list[tuple[int, ...]] = [() for _ in step.tensors[t].spec.shape]
            for axis in solution.order[tie]:
                choice = solution.choices[axis]
                need = _dim_of(groups, i, choice[own], operation.rule.operands[position])
                held = None if choice[tie] == NONE else groups.dim_of(t, choice[tie])
                is_gathered |= held is not None and need is None
                is_exchanged |= held is not None and need not in (None, held)
                if need is not None:
                    spec[need] = (*spec[need], axis)
            sharding, use = of_dims(tuple(spec)), (operation.node, position)
            if groups.of_tensor[t] in groups.of_state:
                if is_gathered and operation.flops:
                    yield Read((use,), sharding)
            elif (is_gathered or is_exchanged) and step.makers[t] is not None:
                origin = operation.origin
                is_forward = origin is None or origin.phase is Phase.FORWARD
                uses.setdefault((t, sharding, is_forward), []).append(use)
    for (_, sharding, _), of_pass in uses.items():
        yield Read(tuple(sorted(of_pass)), sharding)


def _dim_of(
    groups: Groups, number: int, choice: int, dims: Sequence[tuple[int, ...]]
) -> int | None:
    """The dim that an operation's choice splits."""
    if choice == NONE:
        return None
    for d, factors in enumerate(dims):
        if factors and groups.factor_class.get((number, factors[0])) == choice:
            return d
    return None


def _is_heavy_result(groups: Groups, tensor: int) -> bool:
    maker = groups.step.makers[tensor]
    return maker is not None and not groups.step.operations[maker].is_light


def marked(recorded: RecordedGraph, found: Shardings) -> RecordedGraph:
    """The graph whose inputs, results and marks have these shardings; it computes the same.

    A result that replaces an input is placed like it. Other results stay where the partitioner
    puts them; one without dims is replicated.
    """
    ids, marks, over = found.mesh.ids, dict(found.marks), dict(found.summed_over)
    placements = found.placements()
    leaves = tuple(
        replace(leaf, placement=placement) for leaf, placement in zip(recorded.leaves, placements)
    )
    num_leaves = len(leaves)
    nodes: list[Node] = []
    in_loops = by_loop(found.in_loops)
    number: dict[int, int] = {-i - 1: -i - 1 for i in range(num_leaves)}
    before = count = 0
    reads, specs = _by_node(found), [x for node in recorded.nodes for x in node.entry.outs]
    read: dict[tuple[int, int], int] = {}
    for place, node in enumerate(recorded.nodes):
        inputs = [number[n] for n in node.inputs]
        for one in reads.get(place, ()):
            n = node.inputs[one.uses[0][1]]
            spec = specs[n] if n >= 0 else leaves[-n - 1].spec
            nodes.append(Node(mark(spec, one.sharding), (number[n],), node.origin))
            read |= dict.fromkeys(one.uses, count)
            count += 1
        inputs = [read.get((place, i), n) for i, n in enumerate(inputs)]
        entry = with_marks(node.entry, in_loops.get(place, ()))
        nodes.append(Node(entry, tuple(inputs), node.origin))
        for i in range(len(node.entry.outs)):
            number[before + i] = count + i
        count += len(node.entry.outs)
        for i, spec in enumerate(node.entry.outs):
            tensor = num_leaves + before + i
            if tensor in marks:
                axes = over.get(tensor, ()) if tensor in found.gradients else None
                entry = mark(spec, marks[tensor], summed_over=axes)
                nodes.append(Node(entry, (number[before + i],), node.origin))
                number[before + i] = count
                count += 1
        before += len(node.entry.outs)
    replaced = {output: leaf for leaf, output in updated(recorded).items()}
    outputs, regions = [], of_results(recorded)
    for i, output in enumerate(recorded.outputs):
        placement = output.placement
        if i in replaced:
            placement = placements[replaced[i]]
        elif output.value >= 0 and regions[output.value] is not None:
            pass  # it stays on the devices of its manual region
        elif placement is not None or not output.spec.shape:
            placement = Placement.of(replicated(ids), None)
        outputs.append(replace(output, value=number[output.value], placement=placement))
    return replace(
        recorded, leaves=leaves, nodes=tuple(nodes), outputs=tuple(outputs), device_ids=ids
    )


def _by_node(found: Shardings) -> dict[int, list[Read]]:
    """The tensors that are marked where they are read, by the first node that reads them."""
    by_node: dict[int, list[Read]] = {}
    for read in found.reads:
        by_node.setdefault(read.uses[0][0], []).append(read)
    return by_node


def positions(entries: Iterable[Entry], num_leaves: int, found: Shardings) -> tuple[int, ...]:
    """For each operation of the graph that `marked` makes, the position of the one before.

    Args:
        entries: those of the operations of the graph that is marked.
        num_leaves: the number of its inputs.
        found: the shardings.
    """
    marks, reads = dict(found.marks), _by_node(found)
    places: list[int] = []
    tensor = num_leaves
    for position, entry in enumerate(entries):
        after = tensor + len(entry.outs)
        added = len(reads.get(position, ())) + sum(t in marks for t in range(tensor, after))
        places += [position] * (1 + added)
        tensor = after
    return tuple(places)
