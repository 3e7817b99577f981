"""The numbers by which a program's operations refer to values (see `program_graph.Node`)."""

from typing import Any

from spmd_core.graph.values import OpResult, Value


def numbered(
    nodes: list[Value], number_of: dict[Value, int]
) -> tuple[tuple[Any, ...], list[list[int]], list[Any]]:
    """Numbers the results of the operations, behind the values that have numbers.

    Returns:
        Each operation's entry and the numbers of its inputs, one after another; these numbers for
        each operation; and the scalar inputs of all.
    """
    structure: list[Any] = []
    node_inputs: list[list[int]] = []
    numbers: list[Any] = []
    count = 0
    for node in nodes:
        entry = node.entry
        inputs = [number_of[x] if x.parent is None else number(x, number_of) for x in node.inputs]
        number_of[node] = count
        count += len(entry.outs)
        structure.append(entry)
        structure.extend(inputs)
        node_inputs.append(inputs)
        if node.numbers:
            numbers.extend(node.numbers)
    return tuple(structure), node_inputs, numbers


def number(value: Value, number_of: dict[Value, int]) -> int:
    """The value's number, from those of the leaves and nodes (see `program_graph.Node`)."""
    return (
        number_of[value]
        if not isinstance(value, OpResult) or value.parent is None
        else number_of[value.parent] + value.index
    )
