"""Refuses host reads of values inside of recorded loops and branches."""

from spmd_core.errors import ControlFlowError
from spmd_core.graph import recorders
from spmd_core.graph.subgraphs import StandIn
from spmd_core.graph.values import Value


def refuse_inside() -> None:
    """Raises ControlFlowError while this thread records a function that a loop or a branch runs."""
    inside = recorders.current().inside
    if inside is not None:
        raise ControlFlowError(
            f"{inside} is recorded once and runs on the device, where Python reads no value; got a "
            "read on the host: .item(), print, bool() or `if` of a tensor, .cpu(), sync(). "
            "Read before or after it; for what depends on a value, call torch.where or cond."
        )


def refuse_stand_in(leaf: Value) -> None:
    """Raises ControlFlowError for a stand-in, which has a value in each run and none outside."""
    if leaf.data.__class__ is StandIn:
        raise ControlFlowError(
            f"a tensor made in {leaf.data.what} has a value in each run and none outside; "
            f"got one of {leaf.spec!r}, or a result of it, that was kept and used later. "
            "Return it from the function."
        )
