"""Finds what is gathered and then only cast to a smaller dtype, so that it is cast first.

`fully_shard` gathers a parameter before a block uses it, sequence parallelism the input of a layer,
and autocast casts them where they are used. The cast values are the same in either order, and the
gather moves half the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from spmd_core.graph.values import Spec
from spmd_core.program.gradient_plans import MARK_ALONG, MARK_SHARDING
from spmd_core.program.program_graph import Graph
from spmd_core.sharding.sharding import Sharding

_CAST, _GATHERS = "aten::_to_copy", (MARK_SHARDING, MARK_ALONG)
_UNCHANGED = ("aten::clone", "aten::alias", "aten::detach")


@dataclass(frozen=True)
class NarrowGather:
    """A cast that goes before a gather.

    Attributes:
        source: the number of the value to cast.
        before: how that value is sharded.
        after: the sharding of the gathered value.
        along: the axes that both speak of; None for all.
    """

    source: int
    before: Sharding
    after: Sharding
    along: tuple[int, ...] | None


def find(graph: Graph) -> dict[int, NarrowGather]:
    """The casts of a graph that go before a gather, by their positions."""
    uses: dict[int, set[str]] = {}
    for node in graph.nodes:
        for number in node.inputs:
            uses.setdefault(number, set()).add(f"{node.entry.name} {node.entry.spec.dtype}")
    outputs = {output.value for output in graph.outputs}
    made_by = [node for node in graph.nodes for _ in node.entry.outs]

    def spec(number: int) -> Spec:
        return graph.leaves[-number - 1].spec if number < 0 else made_by[number].entry.spec

    def layout(number: int) -> tuple[Sharding | None, tuple[int, ...] | None]:
        while number >= 0 and made_by[number].entry.name in _UNCHANGED:
            number = made_by[number].inputs[0]
        if number < 0:
            return graph.leaves[-number - 1].placement.sharding, None
        return made_by[number].entry.sharding, made_by[number].entry.along

    def found() -> Iterator[tuple[int, NarrowGather]]:
        for position, node in enumerate(graph.nodes):
            number = node.inputs[0] if node.entry.name == _CAST else -1
            if number < 0 or made_by[number].entry.name not in _GATHERS or number in outputs:
                continue
            gather = made_by[number]
            (before, along), after = layout(gather.inputs[0]), gather.entry.sharding
            is_narrower = node.entry.spec.dtype.itemsize < spec(number).dtype.itemsize
            # Another use would gather it in its own dtype as well.
            if before is None or after is None or not is_narrower or len(uses[number]) > 1:
                continue
            if along != gather.entry.along or before.mesh != after.mesh:
                continue
            if _num_split(before) > _num_split(after):
                yield position, NarrowGather(gather.inputs[0], before, after, along)

    return dict(found())


def _num_split(sharding: Sharding) -> int:
    return sum(len(axes) for axes in sharding.dims)
