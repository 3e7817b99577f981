"""Moves a cast to a narrower dtype before the gather whose result it casts.

`fully_shard` gathers a parameter before a block uses it, and sequence parallelism gathers the input
of a layer; autocast then casts the gathered value where it is used. The values are the same in
either order, and the gather of the narrow value moves half the bytes. A value that is gathered and
cast several times is gathered once.
"""

from typing import NamedTuple

from spmd_core.graph.values import Entry
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.ir import Graph, Op, Ref, Rewriter, mark
from spmd_core.program.mark_names import MARK_ALONG, MARK_SHARDING
from spmd_core.program.target import Replicated, Target
from spmd_core.sharding.sharding import Sharding

_GATHERS = (MARK_SHARDING, MARK_ALONG)


class _Gather(NamedTuple):
    """A gather, and the cast that is moved before it.

    Attributes:
        source: the value that is gathered.
        cast: the cast.
        before: the sharding of that value.
        after: the sharding of the gathered value.
        along: the mesh axes that both shardings constrain; None for all.
    """

    source: Ref
    cast: Entry
    before: Sharding
    after: Sharding
    along: tuple[int, ...] | None


def narrow_gathers(graph: Graph, target: Target) -> Graph:
    """The graph with these casts before their gathers."""
    gathers = {} if target.replicated_part is Replicated.EVERYTHING else _gathers(graph)
    if not gathers:
        return graph
    rewriter = Rewriter(graph)
    gathered: dict[_Gather, Ref] = {}
    for op in graph.ops:
        gather = gathers.get(op)
        if gather is None:
            rewriter.keep(op)
            continue
        if gather not in gathered:
            cast = rewriter.add(gather.cast, [rewriter.now(gather.source)], op.source)
            for sharding in (gather.before, gather.after):
                entry = mark(gather.cast.spec, sharding, gather.along)
                cast = rewriter.add(entry, cast.results, op.source)
            gathered[gather] = Ref(cast)
        rewriter.replace(Ref(op), gathered[gather])
    return rewriter.graph()


def _gathers(graph: Graph) -> dict[Op, _Gather]:
    """The gathers whose result is cast, by the cast."""
    casts = [op for op in graph.ops if op.is_cast]
    if not casts:
        return {}
    users, outputs = graph.users(), {*graph.outputs}
    found: dict[Op, _Gather] = {}
    for op in casts:
        gather = op.operands[0].op
        if gather is None or gather.entry.name not in _GATHERS or op.operands[0] in outputs:
            continue
        (before, along), after = _layout(gather.operands[0]), gather.entry.sharding
        is_narrower = op.entry.spec.dtype.itemsize < gather.entry.spec.dtype.itemsize
        if before is None or after is None or not is_narrower:
            continue
        # Another use of the gathered value would need a second gather, in its own dtype.
        uses = {(user.entry.name, user.entry.spec.dtype) for user in users[op.operands[0]]}
        if len(uses) > 1 or along != gather.entry.along or before.mesh != after.mesh:
            continue
        if _num_split(before) > _num_split(after):
            found[op] = _Gather(gather.operands[0], op.entry, before, after, along)
    return found


def _layout(value: Ref) -> tuple[Sharding | None, tuple[int, ...] | None]:
    """The sharding of a value, and the mesh axes that its mark constrains."""
    while (op := value.op) is not None and op.entry.sharding is None:
        source = op.source_of_elements(Elements.SAME)
        if source is None or source.spec.dtype != value.spec.dtype:
            break
        value = source
    if isinstance(value.producer, Op):
        return value.producer.entry.sharding, value.producer.entry.along
    return value.producer.leaf.placement.sharding, None


def _num_split(sharding: Sharding) -> int:
    return sum(len(axes) for axes in sharding.dims)
