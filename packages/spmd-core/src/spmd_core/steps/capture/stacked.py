"""The stacks that a captured program reads and writes, not the tensors that are their rows."""

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import Row, Stack
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Value
from spmd_core.program import stacked_state

_value_of = operator.attrgetter("value")
_Rows = tuple[Storage, ...]


class Stacks:
    """The stacks among the inputs and the results of a program.

    Args:
        read: for each input that is a stack, its position and the storages of the rows.
        written: for each such result, its position, the storages of the rows, and where it lies.
    """

    def __init__(
        self, read: Mapping[int, _Rows], written: Mapping[int, tuple[_Rows, Placement]]
    ) -> None:
        of_results = [rows for rows, _ in written.values()]
        self._groups = [*dict.fromkeys([*read.values(), *of_results])]
        number = {rows: n for n, rows in enumerate(self._groups)}
        self._read = [(i, number[rows]) for i, rows in read.items()]
        self._written = [(i, number[rows], lies) for i, (rows, lies) in written.items()]
        self.storages = [storage for rows in self._groups for storage in rows]
        self.written = [storage for rows in of_results for storage in rows]
        # The values of the storages, the stacks of which they are rows, and the number of
        # references to both after the last results were stored; empty if not known.
        self._values: list[Value] = []
        self._stacks: list[Stack | None] = []
        self._counts: list[list[int]] = []

    def are_there(self) -> bool:
        """Whether the values of the storages that are read are rows of stacks, in their order."""
        if self._are_known():
            return True
        self._counts = []
        self._stacks = [*map(stack_of, self._groups)]
        self._values = [*map(_value_of, self.storages)]
        return all(self._stacks[n] is not None for _, n in self._read)

    def leaves(self) -> list[tuple[int, Value]]:
        """For each input that is a stack, its position and value; after `are_there`."""
        found = [(i, self._stacks[n]) for i, n in self._read]
        return [(i, stack.value) for i, stack in found if stack is not None]

    def store(self, results: Sequence[Any], checked: Any) -> None:
        """Stores the results of a call, in the old values where nobody else has these.

        Args:
            results: of the program.
            checked: `Value.checked` of the new values; None for none.
        """
        if self._are_own():
            for i, n, _ in self._written:
                stack = self._stacks[n]
                assert stack is not None
                stack.value.data = results[i]
            for storage in self.written:
                storage.version += 1
            if checked is not None:
                wholes = [stack.value for stack in self._stacks if stack is not None]
                for value in (*self._values, *wholes):
                    value.checked = checked
            return
        self._values = []
        for i, n, lies in self._written:
            self._stacks[n] = stacked_state.store(self._groups[n], results[i], lies, checked)
        self._values = [*map(_value_of, self.storages)]
        self._counts = self._references()

    def _are_known(self) -> bool:
        return [*map(_value_of, self.storages)] == self._values  # the same objects

    def _are_own(self) -> bool:
        """Whether the values are those that the last call stored, and nobody else's."""
        return (
            bool(self._counts)
            and self._are_known()
            and all(
                stack is not None and stack.value.placement is lies
                for stack, lies in ((self._stacks[n], lies) for _, n, lies in self._written)
            )
            and self._references() == self._counts
        )

    def _references(self) -> list[list[int]]:
        wholes = [None if stack is None else stack.value for stack in self._stacks]
        return [[*map(sys.getrefcount, of)] for of in (self._values, self._stacks, wholes)]


def stack_of(storages: Sequence[Storage]) -> Stack | None:
    """The stack whose rows, all of them in order, are the values of these storages."""
    first = storages[0].value.data
    if first.__class__ is not Row or len(first.stack.owners) != len(storages):
        return None
    stack: Stack = first.stack
    for i, storage in enumerate(storages):
        row = storage.value.data
        if row.__class__ is not Row or row.stack is not stack or row.index != i:
            return None
    return stack
