"""Operations on lists of tensors, such as torch's fused optimizer steps, item by item.

Such an operation reads the parameters of all layers at once. Where these are rows of stacks, the
pass `stacked_operations` takes it apart, as alike items become one operation on the stacks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_core.graph.values import Entry, Spec
from spmd_core.ops import registry
from spmd_core.program.ir import Op, Ref


class Items:
    """Takes operations apart. Items of the same specs and arguments share an entry."""

    def __init__(self) -> None:
        self._entries: dict[Any, Entry] = {}
        self._known: dict[Op, list[Op]] = {}

    def of(self, op: Op) -> list[Op]:
        """The items of an operation whose trait is `by_item`, as operations.

        The n-th result of the operation on item `i` is result `n * length + i` of the operation on
        lists of that length.
        """
        if op not in self._known:
            self._known[op] = self._taken_apart(op)
        return self._known[op]

    def _taken_apart(self, op: Op) -> list[Op]:
        arguments = _schema_arguments(op.entry)
        lists = {name: x for name, x in arguments.items() if isinstance(x, tuple) and x}
        (length,) = {len(x) for x in lists.values()}
        starts: dict[str, int] = {}
        num_operands = 0
        for name, given in arguments.items():
            starts[name] = num_operands
            num_operands += len(given) if isinstance(given, tuple) else isinstance(given, Spec)
        assert num_operands == len(op.operands), op.entry
        found = []
        for item in range(length):
            own = {name: (x[item],) if name in lists else x for name, x in arguments.items()}
            operands = [
                op.operands[starts[name] + (item if name in lists else 0)]
                for name, x in arguments.items()
                if name in lists or isinstance(x, Spec)
            ]
            outs = op.entry.outs[item::length]
            entry = self._entry(op.entry, own, outs)
            found.append(Op(entry, operands, op.source, scalars=op.scalars))
        return found

    def _entry(self, whole: Entry, arguments: Mapping[str, Any], outs: tuple[Spec, ...]) -> Entry:
        key = (whole.name, outs, *arguments.items())
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = Entry(
                whole.name,
                functools.partial(_on_item, registry.lowering_named(whole.name), arguments, outs),
                outs,
                structure=tuple(range(len(outs))),
                number_kinds=whole.number_kinds,
                arguments=arguments,
            )
        return found


def result_of_item(op: Op, items: Sequence[Op]) -> dict[Ref, Ref]:
    """The results of an operation on lists, each with the same result of the operation on an item.

    Args:
        op: the operation on lists.
        items: its items.
    """
    return {
        Ref(op, n * len(items) + i): result
        for i, item in enumerate(items)
        for n, result in enumerate(item.results)
    }


def _schema_arguments(entry: Entry) -> dict[str, Any]:
    """The arguments of an entry that its schema has, in the order of its operands."""
    names = {x.name for x in registry.lowering_named(entry.name).overload._schema.arguments}
    return {name: x for name, x in (entry.arguments or {}).items() if name in names}


def _on_item(
    lowering: registry.Lowering,
    arguments: Mapping[str, Any],
    outs: tuple[Spec, ...],
    context: registry.Context,
    inputs: Sequence[Any],
    numbers: Sequence[registry.Number],
) -> list[Any]:
    arrays, scalars = iter(inputs), iter(numbers)

    def filled(given: Any) -> Any:
        if isinstance(given, tuple):
            return [next(arrays) for _ in given]
        if isinstance(given, Spec):
            return next(arrays)
        return next(scalars) if isinstance(given, type) else given

    by_name = {name: filled(given) for name, given in arguments.items()}
    function: Callable[..., Sequence[Any]] = lowering.function
    context.outs = tuple(registry.Out(spec.shape, spec.dtype) for spec in outs)
    positional = [
        by_name.pop(x.name)
        for x in lowering.overload._schema.arguments
        if not x.kwarg_only and x.name in by_name
    ]
    return [x for x in function(context, *positional, **by_name) if x is not None]
