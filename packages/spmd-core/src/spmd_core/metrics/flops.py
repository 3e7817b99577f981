"""The FLOPs of a compiled program, counted by torch's formulas and by XLA's cost analysis."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import flop_counter

from spmd_core.counters import ProgramRecord
from spmd_core.debugging import hlo_flops
from spmd_core.debugging.programs import kept
from spmd_core.graph.subgraphs import ControlEntry
from spmd_core.graph.values import Entry, Spec
from spmd_core.metrics.step_programs import given
from spmd_core.program import regions
from spmd_core.program.program_graph import Node, RecordedGraph
from spmd_core.source_lines import Origin, Phase


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one run of a program, over all devices. It prints as a table.

    The two counts differ for good reasons. torch's formulas count matrix products and convolutions
    of the recorded program, attention as the whole square, and duplicated computation once. XLA
    counts the optimised program of each device: every operation, computation that the partitioner
    duplicates on several devices, no padding of convolutions, and the blocks of attention that its
    kernel computes.

    Attributes:
        program: the program's name.
        by_operation: by torch's formulas (`torch.utils.flop_counter`, with those that were
            registered by `register_flop_formula`), for each operation that has one.
        by_compiler: by XLA's cost analysis, plus the repetitions of loops, which that leaves out.
            None if a loop has an unknown length, or calls a library of the platform.
        num_jax_calls: calls of jax functions, for which torch has no formula (`call_jax`, and the
            cells of recurrent layers).
    """

    program: str
    by_operation: dict[str, int]
    by_compiler: float | None
    num_jax_calls: int

    @property
    def by_torch(self) -> int:
        """The sum of `by_operation`."""
        return sum(self.by_operation.values())

    def table(self, formulas: Mapping[str, float] | None = None) -> str:
        """The counts side by side, each with its ratio to the first.

        Args:
            formulas: FLOPs of the same step by formula: those for a token (`flops_per_token`)
                times the tokens of the batch. They come first.
        """
        counts: dict[str, float | None] = {
            **(formulas or {}),
            "torch.utils.flop_counter": self.by_torch,
            "XLA's cost analysis": self.by_compiler,
        }
        width = max(map(len, counts))
        first = next(iter(counts.values()))
        lines = [f"{'FLOPs of ' + self.program:<{width}}  {'FLOPs':>10}  ratio"]
        for name, count in counts.items():
            ratio = f"{count / first:5.3f}" if count is not None and first else "    -"
            figure = "unknown" if count is None else f"{count:.4g}"
            lines.append(f"{name:<{width}}  {figure:>10}  {ratio}")
        if self.num_jax_calls:
            lines.append(f"torch.utils.flop_counter leaves out {self.num_jax_calls} jax calls")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def count_flops(program: ProgramRecord | None = None) -> FlopCount:
    """The FLOPs of a compiled program, by torch's formulas and by XLA's cost analysis.

    Unlike a `FlopCounterMode`, which works here too, it needs no further run, and does not change
    the program. Does not wait.

    Args:
        program: one of `programs()`; None: the step's, as `step_program` finds it.

    Raises:
        SpmdError: nothing was compiled yet, or the program is not kept any more.

    Example:
        >>> from spmd_core import sync
        >>> x = torch.ones(8, 16, device="xla")
        >>> y = x @ x.T
        >>> sync()
        >>> from spmd_core.metrics import programs
        >>> count_flops(programs()[-1]).by_operation
        {'aten.mm': 2048}
    """
    chosen = kept(given(program, "count_flops"), "count_flops")
    counts: Counter[str] = Counter()
    for _, name, flops in operation_flops(chosen.graph):
        counts[name] += flops
    repeated = hlo_flops.repeated(chosen.compiled_text())
    record = chosen.record
    return FlopCount(
        record.name,
        dict(counts.most_common()),
        None if repeated is None else record.flops + repeated * record.num_devices,
        num_jax_calls=sum(node.entry.name.startswith("jax::") for node in chosen.graph.nodes),
    )


def operation_flops(graph: RecordedGraph) -> Iterator[tuple[Phase | None, str, int]]:
    """The operations that torch has a formula for: phase, name, and FLOPs over all devices.

    Those of a loop's body count as often as it runs; once where that depends on values. Both
    branches of a condition count. The phase is None where no lines were recorded.
    """
    for node, times in _operations(graph):
        for entry, runs, phase in _runs(node.entry, node.origin):
            flops = _flops(entry)
            if flops is not None:
                yield phase, str(_packet(entry)), times * runs * flops


def entry_flops(entry: Entry) -> int:
    """The FLOPs of one operation on whole tensors, as `operation_flops` counts them; or 0."""
    return sum(runs * (_flops(inner) or 0) for inner, runs, _ in _runs(entry, None))


def _flops(entry: Entry) -> int | None:
    """The FLOPs of an operation; None if torch has no formula for it."""
    packet = _packet(entry)
    formula = flop_counter.flop_registry.get(packet)
    if formula is None:
        return None
    args, kwargs, out = _call(entry, packet)
    return int(formula(*args, **kwargs, out_val=out))


def _runs(entry: Entry, origin: Origin | None) -> Iterator[tuple[Entry, int, Phase | None]]:
    """An operation, or those that it runs; how often, and in which phase."""
    phase = None if origin is None else origin.phase
    if not isinstance(entry, ControlEntry):
        yield entry, 1, phase
        return
    steps = 1 if entry.steps is None else entry.steps
    for subgraph in entry.subgraphs:
        origins = subgraph.origins or (None,) * len(subgraph.nodes)
        for (inner, _), inside in zip(subgraph.nodes, origins, strict=True):
            for each, runs, within in _runs(inner, inside):
                # What a loop's gradient reads of an iteration, and no loop before has kept.
                again = phase is Phase.BACKWARD and within is Phase.FORWARD
                yield each, steps * runs, Phase.RECOMPUTATION if again else within


def _operations(graph: RecordedGraph) -> Iterator[tuple[Node, int]]:
    """The operations, and on how many devices each runs with the shapes that it was recorded for.

    That is 1 for the operations on whole tensors; inside a manual region, each position along the
    region's axes runs an operation.
    """
    manuals, first = regions.of_results(graph), 0
    for node in graph.nodes:
        manual = manuals[first] if node.entry.outs else None
        first += len(node.entry.outs)
        sizes = () if manual is None else (manual.mesh.mesh_shape[axis] for axis in manual.axes)
        yield node, math.prod(sizes)


def _packet(entry: Entry) -> Any:
    """torch's operation; None if the entry is not one."""
    if entry.arguments is None:
        return None
    namespace, _, name = entry.name.partition("::")
    return getattr(getattr(torch.ops, namespace), name.partition(".")[0])


def _call(entry: Entry, packet: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """The arguments of an operation's call, and its result, with meta tensors."""
    assert entry.arguments is not None
    overload = getattr(packet, entry.name.partition(".")[2] or "default")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        value = _meta(entry.arguments.get(argument.name, argument.default_value))
        if not argument.kwarg_only:
            args.append(value)
        elif argument.name in entry.arguments:
            kwargs[argument.name] = value
    outs = [_meta(spec) for spec in entry.outs]
    if entry.structure is None:
        return args, kwargs, outs[0]
    return args, kwargs, tuple(None if i is None else outs[i] for i in entry.structure)


def _meta(value: Any) -> Any:
    if isinstance(value, Spec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_meta(v) for v in value]
    return value(1) if isinstance(value, type) else value  # a number that is an input
