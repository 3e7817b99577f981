"""Small tensors that a captured step updates alike: they become the rows of stacks.

Each input and each result of a program costs the host microseconds, whatever its size, and what
updates it an operation or several. A captured step goes on with the same state. So small tensors
of one form that it updates alike, such as biases, or an optimizer's counters of steps, lie in one
array from its first call on, and `stacked_operations` makes one operation of what updates them.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from spmd_core.graph.placement import Placement
from spmd_core.graph.stacks import Row, Stack, StackEntry
from spmd_core.graph.storage import Storage
from spmd_core.graph.subgraphs import StandIn
from spmd_core.graph.values import Value
from spmd_core.program import automatic
from spmd_core.program.initial_state import Beginning, State
from spmd_core.program.leaves import array_of, convert, target_placement
from spmd_core.program.stacked_groups import lists_of

# Of a larger tensor, the copies into a stack and out of it may cost more than its input and result.
MOST_BYTES = 4096
# So many are worth a stack.
FEWEST = 8


@dataclass(frozen=True)
class CapturedCall:
    """The tensors of a call of a captured step, by their storages.

    Attributes:
        returned: those that it returns: each run of its program makes new ones.
        reached: those that it reached at its beginning, and the gradients of these.
        apart: its arguments, and the gradients: other tensors in each call.
        has_lines: whether `config.record_source_lines` was on around it. Its own operations have
            lines in any case, of which its program does not depend.
    """

    returned: Collection[Storage]
    reached: Collection[Storage]
    apart: Collection[Storage]
    has_lines: bool


def take_out(live: Sequence[Storage], leaves: Sequence[Value], call: CapturedCall) -> None:
    """Gives leaves that are rows of stacks arrays of their own, if the step cannot keep the stacks.

    It keeps those of which it reaches all rows, and updates all or none.

    Args:
        live: the storages that the cut computes.
        leaves: what it reads.
        call: the call.
    """
    updated = set(live)
    are_kept: dict[Stack, bool] = {}
    for leaf in leaves:
        if leaf.data.__class__ is not Row:
            continue
        stack = leaf.data.stack
        if stack not in are_kept:
            rows = [s for s in stack.storages() if s is not None]
            num_updated = sum(s in updated for s in rows)
            are_kept[stack] = (
                automatic.search is None
                and stack.is_whole
                and all(s in call.reached for s in rows)
                and num_updated in (0, len(rows))
            )
        if not are_kept[stack]:
            leaf.data = array_of(leaf)


def groups(
    live: Sequence[Storage],
    nodes: Sequence[Value],
    leaves: Sequence[Value],
    call: CapturedCall,
    device_ids: tuple[int, ...],
    taken: Collection[Value] = (),
) -> list[list[Value]]:
    """The leaves that are small state, in groups that may become the rows of stacks.

    The data of a group lies alike afterwards, or all of it is on the host.

    Args:
        live: the storages that the cut computes.
        nodes: the operations that they need.
        leaves: what these read.
        call: the call.
        device_ids: those of the program.
        taken: leaves that become the rows of other stacks, such as those of loops over layers.
    """
    if automatic.search is not None:  # it reads small state tensor by tensor
        return []
    updated = set(live)
    updates = _updates(nodes)
    asked = {x for node in nodes if node.entry.__class__ is StackEntry for x in node.inputs}
    found: dict[tuple[Placement, Hashable], list[Value]] = {}
    for leaf in leaves:
        owner = None if leaf.owner is None else leaf.owner()
        if owner is None or owner not in updated or owner not in call.reached:
            continue
        if owner in call.apart or owner.committed is not leaf or not _is_small(leaf):
            continue
        if leaf in asked or leaf in taken:  # by a loop over layers, which has a stack of its own
            continue
        if leaf.data.__class__ in (Row, StandIn, Beginning) or leaf.placement.manual is not None:
            continue
        target = target_placement(leaf.placement, device_ids)
        form = (leaf.spec.logical, owner.sharding, updates.get(leaf))
        found.setdefault((target, form), []).append(leaf)
    return [
        group
        for (target, _), group in found.items()
        if len(group) >= FEWEST and _lie_alike(group, target)
    ]


def begun(nodes: Sequence[Value], state: State, call: CapturedCall) -> list[list[Value]]:
    """Leaves of state that begins in a cut, filled with a number, in groups as those of `groups`.

    Args:
        nodes: the operations of the cut.
        state: what begins in it.
        call: the call.
    """
    if automatic.search is not None:  # it reads small state tensor by tensor
        return []
    updates = _updates(nodes)
    found: dict[Hashable, list[Value]] = {}
    for value, leaf in state.inputs.items():
        owner = None if leaf.owner is None else leaf.owner()
        beginning = leaf.data
        if owner is None or owner in call.apart or owner in state.held or not _is_small(leaf):
            continue
        if beginning.__class__ is not Beginning or beginning.number is None:
            continue
        number = repr(beginning.number.item()), beginning.dtypes
        form = (*number, leaf.spec.logical, owner.sharding, leaf.placement, updates.get(value))
        found.setdefault(form, []).append(leaf)
    return [group for group in found.values() if len(group) >= FEWEST]


def _is_small(leaf: Value) -> bool:
    return 0 < leaf.spec.num_bytes <= MOST_BYTES


def _updates(nodes: Sequence[Value]) -> dict[Value, tuple[str, int]]:
    """By value: the first operation that updates it in place, and the number of its argument."""
    found: dict[Value, tuple[str, int]] = {}
    for node in nodes:
        entry = node.entry
        if entry.replaces:
            length = max(lists_of(node)[0], 1)
            for position in entry.replaces:
                found.setdefault(node.inputs[position], (entry.name, position // length))
    return found


def _lie_alike(group: Sequence[Value], target: Placement) -> bool:
    """Moves the data of a group to where a program needs it; whether that is possible."""
    placement = group[0].placement
    if any(leaf.placement is not placement for leaf in group):
        for leaf in group:
            if leaf.placement is not target:
                convert(leaf, target)
        placement = group[0].placement
    return placement.room is None and all(leaf.placement is placement for leaf in group)
