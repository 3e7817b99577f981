"""The differences between two recorded programs, in words: operations, arguments, leaves, results.

A difference that is only a consequence of another one is left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.compile_cache import Compiled
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.sharding import Sharding

# Stands for an argument that the call leaves out.
_DEFAULT = object()
# Longer sections that differ are not aligned operation by operation, but reported as one range.
_MAX_ALIGNED = 2000

_ADVICE_SHAPE = (
    "Sizes that vary share a program only if one size varies, along a dim that no device splits, "
    "and all operations have a rule for it. Pad batches and sequences to one size or a few, "
    "and drop a smaller last batch (drop_last=True)."
)
_ADVICE_STATIC_NUMBER = (
    "A Python number that decides a shape, a position or a formula is part of the program. "
    "Keep it the same from step to step, or pass it as a tensor."
)
_ADVICE_NUMBER_TYPE = (
    "A program is made for an int, a bool or a float. "
    "Write the number in one way each time, such as 2.0 and not 2."
)
_ADVICE_HELD = (
    "A value that a tensor holds at the cut is a result of the program. If that changes "
    "from step to step, drop it before (del), or keep its value on the host (.item(), .cpu())."
)
_ADVICE_DONATED = (
    "A buffer is donated if no tensor holds its value after the cut. "
    "Drop the tensor before, or hold it in every step."
)
_ADVICE_MARKS = (
    "The sharding of a tensor is part of the program. Mark it once, in the same way each time."
)
_ADVICE_BRANCH = (
    "The operations are the program: "
    "an `if` or a loop in Python that depends on the step makes another one."
)


@dataclass(frozen=True)
class Change:
    """One cause of a recompilation.

    Attributes:
        ingredient: the field of `compile_cache.Key` that differs.
        text: the old and the new state, in words.
        advice: what the user can do.
        is_settling: the change is normal between a first step and the second.
    """

    ingredient: str
    text: str
    advice: str = ""
    is_settling: bool = False


class Side:
    """One of the two programs: its operations, and the producer of each of its values."""

    def __init__(self, compiled: Compiled) -> None:
        self.graph, self.key = compiled.graph, compiled.key
        self.names = [node.entry.name for node in self.graph.nodes]
        self.producers = [
            (i, part)
            for i, node in enumerate(self.graph.nodes)
            for part in range(len(node.entry.outs))
        ]

    def spec(self, value: int) -> Spec:
        """The spec of a leaf (negative number) or of a result."""
        if value < 0:
            return self.graph.leaves[-value - 1].spec
        node, part = self.producers[value]
        return self.graph.nodes[node].entry.outs[part]

    def operation(self, i: int) -> str:
        """Text of an operation: `operation 3, aten::mm, at train.py:12`."""
        node = self.graph.nodes[i]
        return f"operation {i}, {node.entry.name}" + (
            "" if node.origin is None else f", at {node.origin}"
        )

    def value(self, value: int) -> str:
        """Text of a leaf (negative number) or of an operation's result."""
        return (
            self.leaf(-value - 1)
            if value < 0
            else f"the result of {self.operation(self.producers[value][0])}"
        )

    def leaf(self, i: int) -> str:
        """Text of a leaf: `leaf 3 (updated in place, read by operation 0, aten::linear)`."""
        known = ["updated in place" if i in self.key.donated else "data"]
        reader = next((n for n, node in enumerate(self.graph.nodes) if -i - 1 in node.inputs), None)
        if reader is not None:
            known.append(f"read by {self.operation(reader)}")
        origin = self.graph.leaves[i].origin
        if origin is not None:
            known.append(f"made at {origin}")
        return f"leaf {i} ({', '.join(known)})"


class Difference:
    """Two programs side by side.

    Operations are aligned by name; values, leaves and results are matched through them.
    """

    def __init__(self, old: Compiled, new: Compiled) -> None:
        self.old, self.new = Side(old), Side(new)
        self._blocks = _matching_blocks(self.old.names, self.new.names)

    @cached_property
    def operations_gone(self) -> tuple[str, ...]:
        """Names of operations that only the old program has."""
        return tuple(name for i, j, _, _ in self._unaligned_ranges for name in self.old.names[i:j])

    @cached_property
    def operations_new(self) -> tuple[str, ...]:
        """Names of operations that only the new program has."""
        return tuple(name for _, _, i, j in self._unaligned_ranges for name in self.new.names[i:j])

    @cached_property
    def _aligned_operations(self) -> list[tuple[int, int]]:
        """Aligned operations, which have the same name: (old index, new index)."""
        return [(a + i, b + i) for a, b, length in self._blocks for i in range(length)]

    @cached_property
    def _unaligned_ranges(self) -> list[tuple[int, int, int, int]]:
        """Ranges between the aligned operations: (old start, old end, new start, new end)."""
        found, a, b = [], 0, 0
        for next_a, next_b, length in [
            *self._blocks,
            (len(self.old.names), len(self.new.names), 0),
        ]:
            if next_a > a or next_b > b:
                found.append((a, next_a, b, next_b))
            a, b = next_a + length, next_b + length
        return found

    @cached_property
    def _new_values(self) -> dict[int, int]:
        """The new program's value for each of the old one's, leaves included.

        Matched are the results and the leaf inputs of aligned operations.
        """
        first_old, first_new = _first_results(self.old), _first_results(self.new)
        found: dict[int, int] = {}
        for i, j in self._aligned_operations:
            a, b = self.old.graph.nodes[i], self.new.graph.nodes[j]
            found.update(
                (first_old[i] + part, first_new[j] + part)
                for part in range(min(len(a.entry.outs), len(b.entry.outs)))
            )
            for x, y in zip(a.inputs, b.inputs):
                if x < 0 and y < 0:
                    found.setdefault(x, y)
        return found

    @cached_property
    def _matched_new_values(self) -> frozenset[int]:
        return frozenset(self._new_values.values())

    @cached_property
    def _leaf_pairs(self) -> list[tuple[int, int]]:
        return [
            (-old - 1, -new - 1)
            for old, new in sorted(self._new_values.items(), reverse=True)
            if old < 0
        ]

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The causes, leaves first."""
        return (
            *self._leaf_changes(),
            *self._operation_changes(),
            *self._result_changes(),
            *self._donation_changes(),
            *self._other_changes(),
        )

    def _leaf_changes(self) -> Iterator[Change]:
        for i, j in self._leaf_pairs:
            old, new = self.old.graph.leaves[i], self.new.graph.leaves[j]
            what = self.new.leaf(j)
            if old.spec.logical is not new.spec.logical:
                yield Change(
                    "leaves",
                    f"{what}: {old.spec!r} -> {new.spec!r}",
                    "" if j in self.new.key.donated else _ADVICE_SHAPE,
                )
            elif old.placement.with_room(None) is not new.placement.with_room(None):
                was, now = placement_text(old.placement), placement_text(new.placement)
                is_settling = old.placement.sharding is None and new.placement.sharding is None
                yield Change(
                    "leaves", f"the sharding of {what}: {was} -> {now}", _ADVICE_MARKS, is_settling
                )

    def _operation_changes(self) -> Iterator[Change]:
        firsts = _first_results(self.new)
        for i, i_end, j, j_end in self._unaligned_ranges:
            yield self._range_change(i, i_end, j, j_end)
        for i, j in self._aligned_operations:
            old, new = self.old.graph.nodes[i], self.new.graph.nodes[j]
            if len(old.inputs) != len(new.inputs):
                text = (
                    f"{self.new.operation(j)}, "
                    f"reads {len(new.inputs)} tensors, and read {len(old.inputs)} before"
                )
                yield Change("structure", text, _ADVICE_BRANCH)
            elif old.entry is not new.entry:
                before, now = (
                    [side.spec(x) for x in node.inputs]
                    for side, node in ((self.old, old), (self.new, new))
                )
                # If the inputs have another shape, the operation's change only follows from it.
                if [s.shape for s in before] == [s.shape for s in now] or not before:
                    yield from self._argument_changes(
                        old.entry, new.entry, self.new.operation(j), before, now, firsts[j]
                    )
            elif self._reads_other_values(old.inputs, new.inputs):
                yield Change(
                    "structure",
                    f"{self.new.operation(j)}, "
                    f"reads other values than before: {self._values_text(new.inputs)}",
                    _ADVICE_BRANCH,
                )

    def _reads_other_values(self, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
        """Whether an input differs. Unaligned values do not count: they are reported themselves."""
        return any(
            x in self._new_values and y in self._matched_new_values and self._new_values[x] != y
            for x, y in zip(old, new)
        )

    def _values_text(self, inputs: tuple[int, ...]) -> str:
        return "; ".join(self.new.value(x) for x in inputs)

    def _range_change(self, i: int, i_end: int, j: int, j_end: int) -> Change:
        gone, made = i_end - i, j_end - j
        if gone == made == 1:
            was, now = self.old.names[i], self.new.operation(j).removeprefix(f"operation {j}, ")
            return Change("structure", f"operation {j} was {was}, is {now}", _ADVICE_BRANCH)
        texts = []
        if gone:
            texts.append(f"{_range_text(i, i_end)} gone: {_names_text(self.old.names[i:i_end])}")
        if made:
            texts.append(f"{_range_text(j, j_end)} new: {_names_text(self.new.names[j:j_end])}")
            origin = self.new.graph.nodes[j].origin
            texts[-1] += "" if origin is None else f", from {origin} on"
        return Change("structure", "; ".join(texts), _ADVICE_BRANCH)

    def _argument_changes(
        self,
        old: Entry,
        new: Entry,
        what: str,
        before: list[Spec],
        now: list[Spec],
        first_result: int,
    ) -> Iterator[Change]:
        if old.sharding is not new.sharding:
            yield Change(
                "structure",
                f"the mark of {what}: "
                f"{_sharding_text(old.sharding)} -> {_sharding_text(new.sharding)}",
                _ADVICE_MARKS,
            )
            return
        if old.border != new.border:
            yield Change(
                "structure", f"{what}, crosses the border of another manual region", _ADVICE_MARKS
            )
            return
        was, is_now = old.arguments, new.arguments
        if was is None or is_now is None:
            same = [(a, b) for a, b in zip(before, now) if a is not b]
            detail = (
                f": it reads {_value_text(same[0][1])}, not {_value_text(same[0][0])}"
                if same
                else "; which, is not known"
            )
            yield Change("structure", f"{what}, has other arguments{detail}")
            return
        for name in dict.fromkeys([*was, *is_now]):
            a, b = was.get(name, _DEFAULT), is_now.get(name, _DEFAULT)
            if a != b and not self._follows_from_shapes(a, b, first_result):
                yield Change(
                    "structure",
                    f"argument {name!r} of {what}: {_argument_text(a)} -> {_argument_text(b)}",
                    _advice_on(a, b),
                )

    def _follows_from_shapes(self, a: Any, b: Any, first_result: int) -> bool:
        """Whether an argument differs only in sizes in which earlier shapes differ too.

        The user then computed it from a shape of a leaf or of an earlier result.
        """
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        changed = {(x, y) for x, y in zip(a, b) if x != y}
        return len(a) == len(b) and bool(changed) and changed <= self._changed_sizes(first_result)

    def _changed_sizes(self, first_result: int) -> set[tuple[int, int]]:
        """The (old, new) pairs of sizes that differ in leaves and in results before this one."""
        specs = (
            (self.old.spec(x), self.new.spec(y))
            for x, y in self._new_values.items()
            if y < first_result
        )
        return {(m, n) for a, b in specs if a is not b for m, n in zip(a.shape, b.shape) if m != n}

    def _result_changes(self) -> Iterator[Change]:
        old = {
            self._new_values.get(number): placement for number, _, placement in self.old.key.outputs
        }
        new = {number: placement for number, _, placement in self.new.key.outputs}
        # With as many results held, and operations changed, a Python name now holds another result.
        follows = bool(self._unaligned_ranges) and len(self.old.key.outputs) == len(
            self.new.key.outputs
        )
        for number, placement in new.items():
            what = f"{self.new.value(number)} ({self.new.spec(number)!r})"
            if number in old and old[number] is not placement:
                is_settling = _is_unmarked(old[number]) and _is_unmarked(placement)
                lay, lies = placement_text(old[number]), placement_text(placement)
                yield Change(
                    "outputs",
                    f"the sharding of {what}: {lay} -> {lies}",
                    _ADVICE_MARKS,
                    is_settling,
                )
            elif number not in old and number in self._matched_new_values and not follows:
                yield Change(
                    "outputs", f"{what} is held at the cut, and was not before", _ADVICE_HELD
                )
        for here in old:
            if here is not None and here not in new and not follows:
                yield Change(
                    "outputs",
                    f"{self.new.value(here)} "
                    f"({self.new.spec(here)!r}) is not held at the cut, and was before",
                    _ADVICE_HELD,
                )

    def _donation_changes(self) -> Iterator[Change]:
        for i, j in self._leaf_pairs:
            was, now = i in self.old.key.donated, j in self.new.key.donated
            if was and not now:
                yield Change(
                    "donated",
                    f"{self.new.leaf(j)} is not donated any more: "
                    "a tensor holds it after this program",
                    _ADVICE_DONATED,
                )
            elif now and not was:
                yield Change(
                    "donated",
                    f"{self.new.leaf(j)} is donated now: no tensor holds it after this program",
                    "",
                    True,
                )

    def _other_changes(self) -> Iterator[Change]:
        old, new = self.old.key, self.new.key
        if old.device_ids != new.device_ids:
            yield Change(
                "device_ids",
                f"the devices: {list(old.device_ids)} -> {list(new.device_ids)}",
                _ADVICE_MARKS,
            )
        if old.options != new.options:
            what = f"config.compiler_options: {dict(old.options)} -> {dict(new.options)}"
            yield Change("options", what, "Set them once, before the first program.")
        for field, setting in (("checks_indices", "check_indices"), ("fold_layers",) * 2):
            before, after = getattr(old, field), getattr(new, field)
            if before != after:
                what = f"config.{setting}: {before} -> {after}"
                yield Change(field, what, "Set it once, before the first program.")
        if old.bound is not None and new.bound is not None and old.bound != new.bound:
            what = f"the growing size may be up to {new.bound}, not {old.bound}"
            yield Change("bound", what)
        if bool(old.origins) != bool(new.origins):
            state = "on, and were off" if new.origins else "off, and were on"
            yield Change(
                "origins",
                f"source lines are {state}",
                "A program names the lines that it was compiled with.",
            )
        elif old.origins != new.origins and self.old.names == self.new.names:
            i = next(n for n, (a, b) in enumerate(zip(old.origins, new.origins)) if a != b)
            yield Change(
                "origins",
                f"operation {i}, "
                f"{self.new.names[i]}, was recorded at {old.origins[i]}, is at {new.origins[i]}",
            )


def _matching_blocks(old: list[str], new: list[str]) -> list[tuple[int, int, int]]:
    """Blocks of equal names: (start in old, start in new, length)."""
    shorter = min(len(old), len(new))
    head = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    tail = next((n for n in range(shorter - head) if old[-n - 1] != new[-n - 1]), shorter - head)
    middle: list[tuple[int, int, int]] = []
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if a and b and max(len(a), len(b)) <= _MAX_ALIGNED:
        matched = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        middle = [(m.a + head, m.b + head, m.size) for m in matched if m.size]
    blocks = [(0, 0, head), *middle, (len(old) - tail, len(new) - tail, tail)]
    return [block for block in blocks if block[2]]


def _first_results(side: Side) -> list[int]:
    firsts, count = [], 0
    for node in side.graph.nodes:
        firsts.append(count)
        count += len(node.entry.outs)
    return firsts


def _range_text(start: int, end: int) -> str:
    return f"operation {start} is" if end == start + 1 else f"operations {start} to {end - 1} are"


def _names_text(names: list[str]) -> str:
    shown = names if len(names) <= 6 else [*names[:5], f"and {len(names) - 5} more"]
    return ", ".join(shown)


def _value_text(value: object) -> str:
    """An argument as a user would write it."""
    if isinstance(value, type):
        return f"a number of type {value.__name__}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, Spec):
        return f"a tensor {value!r} with strides {list(value.strides)}"
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _argument_text(value: object) -> str:
    return "its default" if value is _DEFAULT else _value_text(value)


def _advice_on(a: object, b: object) -> str:
    if isinstance(a, type) or isinstance(b, type):
        return _ADVICE_NUMBER_TYPE
    if isinstance(a, Spec) or isinstance(b, Spec):
        return ""
    return _ADVICE_STATIC_NUMBER


def _is_unmarked(placement: Placement | None) -> bool:
    return placement is None or placement.sharding is None


def _sharding_text(sharding: Sharding | None) -> str:
    if sharding is None:
        return "none"
    axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape().items())
    return f"{_spec_text(sharding.marked_spec)} over ({axes}){sharding.priority_text}"


def _spec_text(spec: Iterable[object]) -> str:
    return f"P({', '.join(map(repr, spec))})"


def placement_text(placement: Placement | None) -> str:
    """Text of a placement, such as `P('fsdp', None) over (fsdp=4, tensor=2)`."""
    if placement is None:
        return "as the partitioner likes"
    if placement.manual is not None:
        names = jax_axis_names(placement.manual.mesh)
        return f"local to ({', '.join(names[axis] for axis in placement.manual.axes)})"
    if placement.sharding is not None:
        return _sharding_text(placement.sharding)
    lies = placement.jax_sharding
    if isinstance(lies, NamedSharding):
        return (
            "unmarked, replicated"
            if lies.spec == PartitionSpec()
            else f"unmarked, {_spec_text(lies.spec)}"
        )
    return f"unmarked, {lies}"
