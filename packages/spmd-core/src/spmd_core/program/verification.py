"""`spmd.debugging.verify()`: compares each partitioned program with itself on one device.

A program's results must not depend on how it is partitioned. If they do, both programs run again
and return the results of all operations, and the error names the first operation whose results
differ although its inputs do not.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch

from spmd_core import counters
from spmd_core.errors import ProgramError, VerificationError
from spmd_core.graph.placement import Placement
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.compilation import build
from spmd_core.program.program import Program
from spmd_core.program.program_graph import Leaf, Node, Output, RecordedGraph
from spmd_core.runtime import buffers, devices
from spmd_core.runtime.jax_sharding import replicated

# For each dtype, the difference that is put down to rounding, as devices add in another order:
# relative to the element, and to the largest element of the tensor. A misplaced element differs by
# far more.
_ROUNDING = {
    torch.float16: (2e-2, 5e-3),
    torch.bfloat16: (5e-2, 2e-2),
    torch.float32: (1e-3, 1e-5),
    torch.float64: (1e-7, 1e-10),
}
# Other dtypes have 8 bits or fewer.
_COARSE = (0.1, 0.1)
Numbers = tuple[list[float], list[int], list[complex]]
# The graph's numbers and leaves, as `Program.run` takes them.
Inputs = tuple[Numbers, Sequence[jax.Array]]


def verify(program: Program, numbers: Numbers, leaves: Sequence[jax.Array], results: Any) -> None:
    """Compares a program's results with those of the same graph on one device. Waits for both.

    A program with a manual region depends on its devices, so it is left out, with a warning.

    Args:
        program: the program, which has run without donated leaves.
        numbers: the floats, ints and complex numbers that it took.
        leaves: the arrays that it took.
        results: the arrays that it returned.

    Raises:
        VerificationError: a result differs by more than rounding.
    """
    graph = program.graph
    try:
        alone = _on_one_device(graph, program.record.name)
    except _NotOnOneDeviceError as error:
        counters.count("programs_not_verified")
        warnings.warn(
            f"verify() compares with one device; {program.record.name} {error}, and was not "
            "verified.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    counters.count("programs_verified")
    inputs = (numbers, _first_device_leaves(graph, leaves))
    ours = _on_host(results, graph.outputs)
    expected = _on_host(alone.run(*numbers, list(inputs[1])), graph.outputs)
    wrong = [i for i, pair in enumerate(zip(ours, expected)) if difference(*pair)]
    if not wrong:
        return
    everything = _with_all_results(program)
    alone = _on_one_device(everything, program.record.name)
    right = _on_host(alone.run(*numbers, list(inputs[1])), everything.outputs)
    found = _first_difference(program, (numbers, leaves), right)
    if found is None and not _vanishes(program, (numbers, leaves), expected):
        return  # every operation is right by itself: rounding errors have accumulated
    raise VerificationError(found or _describe_results(program, wrong, ours, expected))


class _NotOnOneDeviceError(Exception):
    """Why a graph cannot run on one device."""


def _on_one_device(graph: RecordedGraph, name: str) -> Program:
    """The graph as a program on this process's first device."""
    entries = [
        entry
        for node in graph.nodes
        for entry in (node.entry, *(x for part in node.entry.subgraphs for x in part.entries()))
    ]
    if any(entry.border for entry in entries) or any(
        leaf.placement.manual for leaf in graph.leaves
    ):
        raise _NotOnOneDeviceError("has a manual region")
    device = (devices.first_local_device(),)
    everywhere = Placement.of(replicated(device), None)
    without_marks = RecordedGraph(
        tuple(Leaf(leaf.spec, everywhere, leaf.origin) for leaf in graph.leaves),
        tuple(_without_mark(node) for node in graph.nodes),
        tuple(Output(output.value, output.spec, None) for output in graph.outputs),
        (),
        device,
        graph.options,
    )
    try:
        return build(without_marks, f"{name}_on_one_device")
    except (ProgramError, ValueError) as error:  # jax's ValueError: a user's own shard_map
        raise _NotOnOneDeviceError(f"cannot run there ({error})") from error


def _without_mark(node: Node) -> Node:
    if isinstance(node.entry, ControlEntry):
        return dataclasses.replace(node, entry=node.entry.with_entries(_unmarked))
    return dataclasses.replace(node, entry=_unmarked(node.entry))


def _unmarked(entry: Entry) -> Entry:
    if entry.sharding is None:
        return entry
    return Entry(entry.name, lambda ctx, inputs, numbers: inputs, entry.outs, traits=entry.traits)


def _first_device_leaves(graph: RecordedGraph, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    target = replicated((devices.first_local_device(),))
    return [
        buffers.upload(buffers.download(array, leaf.spec.shape), target, leaf.spec.shape)
        for leaf, array in zip(graph.leaves, leaves)
    ]


def _on_host(arrays: Sequence[jax.Array], outputs: Sequence[Output]) -> list[torch.Tensor]:
    return [buffers.download(x, output.spec.shape) for x, output in zip(arrays, outputs)]


def difference(ours: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The difference beyond rounding, such as `3 of 16 elements, first [2]: 5.0, not 70.0`."""
    if ours.numel() == 0:
        return None
    if not (ours.is_floating_point() or ours.is_complex()):
        wrong = ours != expected
    else:
        of_element, of_largest = _ROUNDING.get(ours.dtype.to_real(), _COARSE)
        wide = torch.complex128 if ours.is_complex() else torch.float64
        a, b = ours.to(wide), expected.to(wide)
        size = b.abs()
        scale = size[size.isfinite()].max() if bool(size.isfinite().any()) else torch.tensor(1.0)
        distance = (a - b).abs()
        same = (a == b) | (a.isnan() & b.isnan())
        wrong = ~(same | (distance <= of_element * size + of_largest * scale) & b.isfinite())
    count = int(wrong.sum())
    if not count:
        return None
    place = [int(i) for i in wrong.nonzero()[0]]
    position = tuple(place)
    return (
        f"{count:,} of {ours.numel():,} elements, first {place}: {ours[position].item()}, "
        f"not {expected[position].item()}"
    )


def _with_all_results(program: Program) -> RecordedGraph:
    """The graph that returns the results of all operations, with placements of XLA's choice."""
    graph = program.graph
    specs = [spec for node in graph.nodes for spec in node.entry.outs]
    outputs = tuple(Output(value, spec, None) for value, spec in enumerate(specs))
    return dataclasses.replace(graph, outputs=outputs, donated=(), checks_indices=False)


def _first_difference(program: Program, inputs: Inputs, expected: Any) -> str | None:
    """Describes the first operation that is wrong for the values that it reads; None if none is.

    Args:
        program: the program.
        inputs: the program's inputs.
        expected: the results of all operations on one device. Only operations whose results differ
            from these are run again.
    """
    graph = _with_all_results(program)
    parted = build(graph, f"{program.record.name}_with_all_results")
    ours = _on_host(parted.run(*inputs[0], list(inputs[1])), graph.outputs)
    leaves = _on_host(inputs[1], [Output(0, leaf.spec, None) for leaf in graph.leaves])
    numbers = [iter(kind) for kind in inputs[0]]
    value = 0
    for position, node in enumerate(graph.nodes):
        own = _numbers_of(node, numbers)
        results = range(value, value + len(node.entry.outs))
        value = results.stop
        if any(difference(ours[n], expected[n]) for n in results):
            # Its inputs may differ as well, by rounding or by an earlier error. So it runs alone,
            # on the inputs that it had.
            read = [ours[i] if i >= 0 else leaves[-i - 1] for i in node.inputs]
            right = _run_alone(graph, node, own, read)
            differs = next(
                (d for n, x in zip(results, right) if (d := difference(ours[n], x))), None
            )
            if differs:
                return _describe_operation(parted, position, results[0], differs)
    return None


def _numbers_of(node: Node, numbers: Sequence[Iterator[Any]]) -> Numbers:
    """The numbers of an operation, taken from the iterators by kind."""
    own: Numbers = ([], [], [])
    for kind in node.entry.number_kinds:
        place = (float, int, complex).index(int if kind is bool else kind)
        own[place].append(next(numbers[place]))
    return own


def _run_alone(
    graph: RecordedGraph, node: Node, numbers: Numbers, read: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of one operation on one device, for these inputs."""
    target = replicated((devices.first_local_device(),))
    specs = [Spec.contiguous(tuple(x.shape), x.dtype) for x in read]
    leaves = tuple(Leaf(spec, Placement.of(target, None)) for spec in specs)
    inputs = tuple(-i - 1 for i in range(len(read)))
    outputs = tuple(Output(i, spec, None) for i, spec in enumerate(node.entry.outs))
    single = dataclasses.replace(
        graph,
        leaves=leaves,
        nodes=(dataclasses.replace(node, inputs=inputs),),
        outputs=outputs,
    )
    alone = _on_one_device(single, f"{node.entry.name}_alone")
    arrays = [buffers.upload(x, target, spec.shape) for x, spec in zip(read, specs)]
    return _on_host(alone.run(*numbers, arrays), outputs)


def _vanishes(program: Program, inputs: Inputs, expected: Sequence[torch.Tensor]) -> bool:
    """Whether the error vanishes in the program that returns the results of all operations."""
    graph = _with_all_results(program)
    results = build(graph, program.record.name).run(*inputs[0], list(inputs[1]))
    for output, right in zip(program.graph.outputs, expected):
        if output.value >= 0:
            ours = buffers.download(results[output.value], output.spec.shape)
            if difference(ours, right):
                return False
    return True


def _describe_operation(program: Program, position: int, value: int, differs: str) -> str:
    graph = program.graph
    node = graph.nodes[position]
    where = "" if node.origin is None else f", recorded at {node.origin},"
    inputs = ", ".join(_layout(program, i) for i in node.inputs) or "no tensors"
    return (
        f"{_RULE} operation {position} of {program.record.name}, {node.entry!r}{where} does on "
        f"{len(graph.device_ids)} devices: {differs}. It reads {inputs}, and its result is "
        f"{_layout(program, value)}. {_ADVICE}"
    )


def _describe_results(
    program: Program,
    wrong: Sequence[int],
    ours: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> str:
    results = "; ".join(
        f"result {program.graph.outputs[i].spec!r}: {difference(ours[i], expected[i])}"
        for i in wrong[:4]
    )
    names = ", ".join(dict.fromkeys(node.entry.name for node in program.graph.nodes))
    return (
        f"{_RULE} those of {program.record.name} do on {len(program.graph.device_ids)} devices: "
        f"{results}. They are right when the results of all operations are kept, so no single "
        f"operation can be named; it has {names}. {_ADVICE}"
    )


_RULE = "a program's results must not depend on its partitioning;"
_ADVICE = (
    "Nothing was changed. Mark the inputs in another way, or call spmd.sync() before the "
    "operation, and report the program: XLA's partitioner or a lowering of this package is wrong."
)


def _layout(program: Program, value: int) -> str:
    """A value's spec and partition spec."""
    if value >= 0:
        spec, placement = program.graph.outputs[value].spec, program.out_placements[value]
    else:
        leaf = program.graph.leaves[-value - 1]
        spec, placement = leaf.spec, leaf.placement
    return f"{spec!r} split {tuple(placement.device_sharding.spec)}"
