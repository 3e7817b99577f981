"""What differs between two recorded programs: operations, arguments, leaves, results, in words. What only follows from another change is left out."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from spmd_core.debugging import arguments
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.compile_cache import Compiled
from spmd_core.runtime.placement import Placement, jax_axis_names
from spmd_core.sharding.sharding import Sharding

# Beyond, the parts of two programs that have other operations are told by their lengths.
_MAX_ALIGNED = 2000

_PAD = "Every new shape is a program of its own. Pad batches and sequences to one size or a few, and drop a smaller last batch (drop_last=True)."
_STATIC = (
    "A Python number that decides a shape, a position or a formula is part of the program. Keep it the same from step to step, "
    "or pass it as a tensor."
)
_KIND = "A program is made for an int, a bool or a float. Write the number in one way each time, such as 2.0 and not 2."
_HELD = (
    "A result that somebody holds at the cut is a result of the program. Where that changes from step to step, drop it before (del), "
    "or keep its value on the host (.item(), .cpu())."
)
_DONATED = "A buffer is reused where no tensor holds its value after the cut. Drop the tensor before, or hold it in every step."
_MARKS = "Where a tensor lies is part of the program. Mark it once, in the same way each time."
_BRANCH = "The operations are the program: an `if` or a loop in Python that depends on the step makes another one."


@dataclass(frozen=True)
class Change:
    """One cause: the field of `compile_cache.Key`, what it was and is in words, and what a user can do. `is_settling`: as after any first step."""

    ingredient: str
    text: str
    advice: str = ""
    is_settling: bool = False


class Side:
    """One of the two programs: its operations, and where each of its values comes from."""

    def __init__(self, compiled: Compiled) -> None:
        self.graph, self.key = compiled.graph, compiled.key
        self.names = [node.entry.name for node in self.graph.nodes]
        self.producers = [
            (i, part)
            for i, node in enumerate(self.graph.nodes)
            for part in range(len(node.entry.outs))
        ]

    def spec(self, value: int) -> Spec:
        """Of a leaf (negative) or a result."""
        if value < 0:
            return self.graph.leaves[-value - 1].spec
        node, part = self.producers[value]
        return self.graph.nodes[node].entry.outs[part]

    def operation(self, i: int) -> str:
        """`operation 3, aten::mm, at train.py:12`."""
        node = self.graph.nodes[i]
        return f"operation {i}, {node.entry.name}" + (
            "" if node.origin is None else f", at {node.origin}"
        )

    def value(self, value: int) -> str:
        """A leaf, or a result of an operation."""
        return (
            self.leaf(-value - 1)
            if value < 0
            else f"the result of {self.operation(self.producers[value][0])}"
        )

    def leaf(self, i: int) -> str:
        """`leaf 3 (updated in place, read by operation 0, aten::linear)`."""
        known = ["updated in place" if i in self.key.donated else "data"]
        reader = next((n for n, node in enumerate(self.graph.nodes) if -i - 1 in node.inputs), None)
        if reader is not None:
            known.append(f"read by {self.operation(reader)}")
        origin = self.graph.leaves[i].origin
        if origin is not None:
            known.append(f"made at {origin}")
        return f"leaf {i} ({', '.join(known)})"


class Difference:
    """Two programs side by side. Operations are aligned by name; values, leaves and results through them."""

    def __init__(self, old: Compiled, new: Compiled, known: arguments.Arguments) -> None:
        self.old, self.new, self._known = Side(old), Side(new), known
        self._blocks = _aligned(self.old.names, self.new.names)

    @cached_property
    def operations_gone(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(name for i, j, _, _ in self._unlike for name in self.old.names[i:j])

    @cached_property
    def operations_new(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(name for _, _, i, j in self._unlike for name in self.new.names[i:j])

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Operations of the same name that stand for each other."""
        return [(a + i, b + i) for a, b, length in self._blocks for i in range(length)]

    @cached_property
    def _unlike(self) -> list[tuple[int, int, int, int]]:
        """The ranges, in the old program and in the new, between what is aligned."""
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
    def _values(self) -> dict[int, int]:
        """The new program's value for each of the old one's, leaves included: what aligned operations make and read."""
        first_old, first_new = _first_results(self.old), _first_results(self.new)
        found: dict[int, int] = {}
        for i, j in self._pairs:
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
    def _aligned_values(self) -> frozenset[int]:
        return frozenset(self._values.values())

    @cached_property
    def _leaves(self) -> list[tuple[int, int]]:
        return [
            (-old - 1, -new - 1)
            for old, new in sorted(self._values.items(), reverse=True)
            if old < 0
        ]

    @cached_property
    def _all(self) -> tuple[Change, ...]:
        return (
            *self._of_leaves(),
            *self._of_operations(),
            *self._of_results(),
            *self._of_donated(),
            *self._of_the_rest(),
        )

    def changes(self) -> tuple[Change, ...]:
        """The causes, leaves first."""
        return self._all

    def _of_leaves(self) -> Iterator[Change]:
        for i, j in self._leaves:
            old, new = self.old.graph.leaves[i], self.new.graph.leaves[j]
            what = self.new.leaf(j)
            if old.spec.logical is not new.spec.logical:
                yield Change(
                    "leaves",
                    f"{what}: {old.spec!r} -> {new.spec!r}",
                    "" if j in self.new.key.donated else _PAD,
                )
            elif old.placement is not new.placement:
                was, now = placement_text(old.placement), placement_text(new.placement)
                is_settling = old.placement.sharding is None and new.placement.sharding is None
                yield Change(
                    "leaves", f"the sharding of {what}: {was} -> {now}", _MARKS, is_settling
                )

    def _of_operations(self) -> Iterator[Change]:
        firsts = _first_results(self.new)
        for i, i_end, j, j_end in self._unlike:
            yield self._of_range(i, i_end, j, j_end)
        for i, j in self._pairs:
            old, new = self.old.graph.nodes[i], self.new.graph.nodes[j]
            if len(old.inputs) != len(new.inputs):
                text = f"{self.new.operation(j)}, reads {len(new.inputs)} tensors, and read {len(old.inputs)} before"
                yield Change("structure", text, _BRANCH)
            elif old.entry is not new.entry:
                before, now = (
                    [side.spec(x) for x in node.inputs]
                    for side, node in ((self.old, old), (self.new, new))
                )
                # Where what it reads has another shape, the operation follows.
                if [s.shape for s in before] == [s.shape for s in now] or not before:
                    yield from self._of_arguments(
                        old.entry, new.entry, self.new.operation(j), before, now, firsts[j]
                    )
            elif self._reads_other_values(old.inputs, new.inputs):
                yield Change(
                    "structure",
                    f"{self.new.operation(j)}, reads other values than before: {self._read(new.inputs)}",
                    _BRANCH,
                )

    def _reads_other_values(self, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
        """What is not aligned is reported by itself."""
        return any(
            x in self._values and y in self._aligned_values and self._values[x] != y
            for x, y in zip(old, new)
        )

    def _read(self, inputs: tuple[int, ...]) -> str:
        return "; ".join(self.new.value(x) for x in inputs)

    def _of_range(self, i: int, i_end: int, j: int, j_end: int) -> Change:
        gone, made = i_end - i, j_end - j
        if gone == made == 1:
            was, now = self.old.names[i], self.new.operation(j).removeprefix(f"operation {j}, ")
            return Change("structure", f"operation {j} was {was}, is {now}", _BRANCH)
        texts = []
        if gone:
            texts.append(f"{_range_text(i, i_end)} gone: {_names_text(self.old.names[i:i_end])}")
        if made:
            texts.append(f"{_range_text(j, j_end)} new: {_names_text(self.new.names[j:j_end])}")
            origin = self.new.graph.nodes[j].origin
            texts[-1] += "" if origin is None else f", from {origin} on"
        return Change("structure", "; ".join(texts), _BRANCH)

    def _of_arguments(
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
                f"the mark of {what}: {_sharding_text(old.sharding)} -> {_sharding_text(new.sharding)}",
                _MARKS,
            )
            return
        if old.border != new.border:
            yield Change(
                "structure", f"{what}, crosses the border of another manual region", _MARKS
            )
            return
        was, is_now = self._known.of(old), self._known.of(new)
        if was is None or is_now is None:
            same = [(a, b) for a, b in zip(before, now) if a is not b]
            detail = (
                f": it reads {arguments.text(same[0][1])}, not {arguments.text(same[0][0])}"
                if same
                else "; which, is not known"
            )
            yield Change("structure", f"{what}, has other arguments{detail}")
            return
        for name in dict.fromkeys([*was, *is_now]):
            a, b = was.get(name, _DEFAULT), is_now.get(name, _DEFAULT)
            if a != b and not self._follows(a, b, first_result):
                yield Change(
                    "structure",
                    f"argument {name!r} of {what}: {_argument_text(a)} -> {_argument_text(b)}",
                    _advice_on(a, b),
                )

    def _follows(self, a: Any, b: Any, first_result: int) -> bool:
        """Whether an argument differs only in sizes that the shapes of leaves or earlier results differ in: the user computed it from a shape."""
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        changed = {(x, y) for x, y in zip(a, b) if x != y}
        return len(a) == len(b) and bool(changed) and changed <= self._sizes(first_result)

    def _sizes(self, first_result: int) -> set[tuple[int, int]]:
        """The sizes that differ, old and new, in the leaves and in results before this one."""
        specs = (
            (self.old.spec(x), self.new.spec(y))
            for x, y in self._values.items()
            if y < first_result
        )
        return {(m, n) for a, b in specs if a is not b for m, n in zip(a.shape, b.shape) if m != n}

    def _of_results(self) -> Iterator[Change]:
        old = {self._values.get(number): placement for number, _, placement in self.old.key.outputs}
        new = {number: placement for number, _, placement in self.new.key.outputs}
        # Where as many results are held and operations changed, the name that holds one now stands for another.
        follows = bool(self._unlike) and len(self.old.key.outputs) == len(self.new.key.outputs)
        for number, placement in new.items():
            what = f"{self.new.value(number)} ({self.new.spec(number)!r})"
            if number in old and old[number] is not placement:
                is_settling = _is_unmarked(old[number]) and _is_unmarked(placement)
                lay, lies = placement_text(old[number]), placement_text(placement)
                yield Change(
                    "outputs", f"the sharding of {what}: {lay} -> {lies}", _MARKS, is_settling
                )
            elif number not in old and number in self._aligned_values and not follows:
                yield Change("outputs", f"{what} is held at the cut, and was not before", _HELD)
        for here in old:
            if here is not None and here not in new and not follows:
                yield Change(
                    "outputs",
                    f"{self.new.value(here)} ({self.new.spec(here)!r}) is not held at the cut, and was before",
                    _HELD,
                )

    def _of_donated(self) -> Iterator[Change]:
        for i, j in self._leaves:
            was, now = i in self.old.key.donated, j in self.new.key.donated
            if was and not now:
                yield Change(
                    "donated",
                    f"{self.new.leaf(j)} is not donated any more: a tensor holds it after this program",
                    _DONATED,
                )
            elif now and not was:
                yield Change(
                    "donated",
                    f"{self.new.leaf(j)} is donated now: no tensor holds it after this program",
                    "",
                    True,
                )

    def _of_the_rest(self) -> Iterator[Change]:
        old, new = self.old.key, self.new.key
        if old.device_ids != new.device_ids:
            yield Change(
                "device_ids",
                f"the devices: {list(old.device_ids)} -> {list(new.device_ids)}",
                _MARKS,
            )
        if old.options != new.options:
            what = f"config.compiler_options: {dict(old.options)} -> {dict(new.options)}"
            yield Change("options", what, "Set them once, before the first program.")
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
                f"operation {i}, {self.new.names[i]}, was recorded at {old.origins[i]}, is at {new.origins[i]}",
            )


_DEFAULT = object()


def _aligned(old: list[str], new: list[str]) -> list[tuple[int, int, int]]:
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


def _argument_text(value: Any) -> str:
    return "its default" if value is _DEFAULT else arguments.text(value)


def _advice_on(a: Any, b: Any) -> str:
    if isinstance(a, type) or isinstance(b, type):
        return _KIND
    if isinstance(a, Spec) or isinstance(b, Spec):
        return ""
    return _STATIC


def _is_unmarked(placement: Placement | None) -> bool:
    return placement is None or placement.sharding is None


def _sharding_text(sharding: Sharding | None) -> str:
    if sharding is None:
        return "none"
    axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape().items())
    return f"{_spec_text(sharding.partition_spec)} over ({axes})"


def _spec_text(spec: Any) -> str:
    return f"P({', '.join(map(repr, spec))})"


def placement_text(placement: Placement | None) -> str:
    """`P('fsdp', None) over (fsdp=4, tensor=2)`, or how an unmarked tensor lies."""
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
