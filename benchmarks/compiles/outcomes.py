"""Judges whether the programs of an entry of torch's operator database compile for a target.

Each sample of the entry (`benchmarks/opinfo`) is recorded as in a plan, and its program is made and
not run. Where it does not compile, each of its operations is compiled alone, which names those at
fault.
"""

import re
import warnings
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

import spmd_core as spmd
from benchmarks.compiles.target import Target
from benchmarks.opinfo import cases
from benchmarks.opinfo.samples import DTYPES_BY_NAME, applies, excluded, moved, samples
from spmd_core.errors import PlanReadError, SpmdError
from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import take_pending
from spmd_core.program import planning
from spmd_core.program.program_graph import Leaf, Node, Output, RecordedGraph
from spmd_core.runtime.jax_sharding import replicated

DTYPES = {**DTYPES_BY_NAME, "float64": torch.float64, "complex128": torch.complex128}


class Status(StrEnum):
    """The outcome for an entry's variant, from best to worst."""

    COMPILES = "compiles"
    EXCLUDED = "excluded"
    READS = "reads values"  # on the host, as on any device
    HOST = "on the host"
    FAILS = "does not compile"


_RANK = list(Status)


@dataclass
class Outcome:
    """The outcome for one entry, variant and dtype: that of its worst sample.

    Attributes:
        reason: why it does not compile; which operations run on the host.
        compiled: the overloads in programs that compile.
        failed: why, for each overload that does not compile alone.
        host: the overloads that run on the host.
    """

    entry: str
    variant: str
    dtype: str
    status: Status = Status.COMPILES
    num_samples: int = 0
    reason: str = ""
    compiled: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    host: list[str] = field(default_factory=list)

    def worsen(self, status: Status, reason: str) -> None:
        """Adopts the status and its reason if the status is worse than the current one."""
        if _RANK.index(status) > _RANK.index(self.status):
            self.status, self.reason = status, reason


def examine(
    op: Any, variant: str, dtype: torch.dtype, target: Target, *, limit: int
) -> Outcome | None:
    """The outcome for one entry, variant and dtype, or None where there is nothing to compile.

    Args:
        op: an entry of `benchmarks.opinfo.samples.entries()`.
        variant: "forward" or "gradient".
        dtype: of the samples.
        target: what to compile for. With several devices, the first tensor of each sample is split.
        limit: at most this many samples, evenly spread; 0: all.
    """
    if not applies(op, variant, dtype):
        return None
    outcome = Outcome(op.formatted_name, variant, str(dtype).removeprefix("torch."))
    reason = excluded(op.formatted_name, dtype)
    if reason is not None:
        outcome.status, outcome.reason = Status.EXCLUDED, reason
        return outcome
    compiled: set[str] = set()

    def on_program(program: Any, leaves: Any) -> None:
        compiled.update(node.entry.name for node in program.graph.nodes)

    with warnings.catch_warnings(), target.entered(on_program) as mesh:
        warnings.simplefilter("ignore")
        for sample in samples(op, dtype, requires_grad=variant == "gradient", limit=limit):
            run = cases.RUN[variant]
            torch.manual_seed(0)
            try:
                run(op, moved(sample, "cpu"))
            except Exception:  # eager torch refuses the sample
                continue
            outcome.num_samples += 1
            before = spmd.metrics.host_fallbacks()
            torch.manual_seed(0)
            got = None
            try:
                got = run(op, moved(sample, "xla", mesh=mesh))
            except PlanReadError:
                outcome.worsen(Status.READS, "for a shape, a Python number or an error")
            except Exception as error:  # every kind of failure is a finding
                outcome.worsen(Status.FAILS, brief(error))
            fallen = cases.fell_back(before)
            if fallen:
                outcome.worsen(Status.HOST, ", ".join(fallen))
                outcome.host = sorted({*outcome.host, *fallen})
            graph = _pending_graph()
            del got
            if graph is not None and graph.nodes:
                compiled.update(_made(graph, target, outcome))
    outcome.compiled = sorted(compiled)
    return outcome if outcome.num_samples else None


def _pending_graph() -> RecordedGraph | None:
    with lock:
        live = take_pending()
        return planning.plan(live).graph() if live else None


def _made(graph: RecordedGraph, target: Target, outcome: Outcome) -> set[str]:
    """The names of the operations that compile: all of them, or those that do so alone."""
    try:
        target.make(graph)
        return {node.entry.name for node in graph.nodes}
    except Exception as error:
        found, failed = set(), {}
        for position, node in enumerate(graph.nodes):
            try:
                target.make(alone(graph, position))
                found.add(node.entry.name)
            except Exception as own:
                failed[node.entry.name] = brief(own)
        outcome.failed |= failed
        culprits = "; ".join(f"{name}: {why}" for name, why in failed.items())
        outcome.worsen(Status.FAILS, culprits or f"the whole program alone: {brief(error)}")
        return found


def alone(graph: RecordedGraph, position: int) -> RecordedGraph:
    """The program of one operation, whose inputs are replicated."""
    node = graph.nodes[position]
    specs = [spec for n in graph.nodes for spec in n.entry.outs]
    inputs = [specs[i] if i >= 0 else graph.leaves[-i - 1].spec for i in node.inputs]
    whole = Placement.of(replicated(graph.device_ids), None)
    return RecordedGraph(
        tuple(Leaf(spec, whole) for spec in inputs),
        (Node(node.entry, tuple(-i - 1 for i in range(len(inputs)))),),
        tuple(Output(i, spec, None) for i, spec in enumerate(node.entry.outs)),
        (),
        graph.device_ids,
    )


def brief(error: BaseException) -> str:
    """The error's kind and first line, without what differs from program to program."""
    text = str(error.__cause__ if isinstance(error, SpmdError) and error.__cause__ else error)
    line = next((line for line in text.splitlines() if line.strip()), "")
    line = re.sub(r"%[\w.-]+", "%x", re.sub(r"\[[\d,]*\](\{[^}]*\})?", "[]", line))
    return f"{type(error).__name__}: {line}"[:300]
