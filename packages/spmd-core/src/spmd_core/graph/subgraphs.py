"""Subgraphs: functions that were recorded once, which an operation runs: a loop's body, a branch.

A function is recorded on stand-ins, tensors whose values are leaves without data. What it computes
of them is a `Subgraph`, which a `ControlEntry` runs as often as its loop says. Both are immutable:
two recordings of the same function are equal, and share one entry.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from spmd_core.graph.values import Entry, Spec
from spmd_core.sharding.sharding import Sharding
from spmd_core.source_lines import Origin

# The results of a subgraph for some arrays; and of its index checks what `Flag.look` finds, or None
# if the operation has none.
Body = Callable[[Sequence[jax.Array]], tuple[list[jax.Array], jax.Array | None]]
# (the subgraphs, the operands, what index checks found so far or None) -> (the results, what was
# found).
Control = Callable[
    [Sequence[Body], Sequence[jax.Array], jax.Array | None],
    tuple[list[jax.Array], jax.Array | None],
]


SCAN = "spmd::scan"
"""The name of a loop over the rows of stacks that carries tensors (`control_flow.scans`)."""


class StandIn:
    """The data of a leaf that stands for the values of all iterations.

    Attributes:
        what: the function that it was made for, such as "the function of a scan".
        start: a serial before those of the function's operations.
    """

    __slots__ = ("start", "what")

    def __init__(self, what: str, start: int) -> None:
        self.what, self.start = what, start


@dataclass(frozen=True)
class Subgraph:
    """A recorded function of tensors.

    Attributes:
        parameters: the specs of its arguments.
        nodes: its operations in order, each with the numbers of its inputs: n >= 0 is the n-th
            result, counted over all operations; n < 0 is parameter -n - 1.
        outputs: the numbers of what it returns.
        origins: the user's line of each operation; empty where they were not recorded.
    """

    parameters: tuple[Spec, ...]
    nodes: tuple[tuple[Entry, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    origins: tuple[Origin | None, ...] = ()

    @cached_property
    def number_kinds(self) -> tuple[type, ...]:
        """The types of the scalar inputs of all its operations, in order."""
        return tuple(kind for entry, _ in self.nodes for kind in entry.number_kinds)

    @cached_property
    def hash(self) -> int:
        """A hash of the whole subgraph, computed once."""
        return hash((self.parameters, self.nodes, self.outputs, self.origins))

    def __hash__(self) -> int:
        return self.hash

    def entries(self) -> Iterator[Entry]:
        """Its operations, and those of subgraphs that these run."""
        for entry, _ in self.nodes:
            yield entry
            for inner in entry.subgraphs:
                yield from inner.entries()


class ControlEntry(Entry):
    """An operation that runs subgraphs; `program.fold` lowers them.

    Its scalar inputs are those of the first subgraph, then those of the second one.

    Attributes:
        subgraphs: what it runs.
        control: runs them.
        steps: how often it runs each of them; None where that depends on values.
        stacked: the positions of the operands whose first dim its iterations go over.
        stacks: the positions of such results.
        shardings: of the marks and manual regions in the subgraphs.
    """

    __slots__ = ("control", "shardings", "stacked", "stacks", "steps", "subgraphs")

    def __init__(
        self,
        name: str,
        control: Control,
        subgraphs: tuple[Subgraph, ...],
        outs: tuple[Spec, ...],
        *,
        steps: int | None = None,
        stacked: range = range(0),
        stacks: range = range(0),
    ) -> None:
        kinds = tuple(kind for subgraph in subgraphs for kind in subgraph.number_kinds)
        super().__init__(name, _never, outs, structure=tuple(range(len(outs))), number_kinds=kinds)
        self.control, self.subgraphs, self.steps = control, subgraphs, steps
        self.stacked, self.stacks = stacked, stacks
        self.shardings: frozenset[Sharding] = frozenset(
            sharding for subgraph in subgraphs for sharding in _shardings(subgraph)
        )

    def with_entries(self, change: Callable[[Entry], Entry]) -> "ControlEntry":
        """The same operation, with each operation of its subgraphs replaced by another one."""

        def changed(entry: Entry) -> Entry:
            if isinstance(entry, ControlEntry):
                return entry.with_entries(change)
            return change(entry)

        return self.with_subgraphs(
            tuple(
                Subgraph(
                    subgraph.parameters,
                    tuple((changed(entry), inputs) for entry, inputs in subgraph.nodes),
                    subgraph.outputs,
                    subgraph.origins,
                )
                for subgraph in self.subgraphs
            )
        )

    def with_subgraphs(self, subgraphs: tuple[Subgraph, ...]) -> "ControlEntry":
        """The same operation on other subgraphs, with equal parameters, results and numbers."""
        return ControlEntry(
            self.name,
            self.control,
            subgraphs,
            self.outs,
            steps=self.steps,
            stacked=self.stacked,
            stacks=self.stacks,
        )


def _shardings(subgraph: Subgraph) -> Iterator[Sharding]:
    for entry in subgraph.entries():
        if entry.sharding is not None:
            yield entry.sharding
        if entry.border is not None:
            yield entry.border.sharding


def _never(*_: Any) -> Any:
    """The kernel of an operation with subgraphs, which the lowering does not call."""
    raise AssertionError("an operation with subgraphs is run by `program.fold`")
