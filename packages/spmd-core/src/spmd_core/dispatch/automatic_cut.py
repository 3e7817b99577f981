"""Cuts in a loop that records step after step without a `sync()` or a read.

One program of all its steps would take minutes to compile. So where much is pending, the recorded
graph is looked at. If its operations repeat themselves and update a state, it is a loop, and each
of its steps so far becomes a run of one small program. From then on another `__torch_dispatch__`
counts the recorded operations and cuts after each period. Any other cut brings the router back.
"""

import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd_core import counters
from spmd_core.dispatch import router
from spmd_core.graph import repetition, storage
from spmd_core.graph.values import Entry, Value, take_serial
from spmd_core.program import execution, planning
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# A graph of fewer operations stays whole, whatever it repeats.
MIN_OPERATIONS = 1024
# From here on a graph that repeats itself is cut even where it updates no state. Below, its parts
# may be the layers of one step.
MIN_STATELESS = 16 * MIN_OPERATIONS
# From here on a graph is cut where it is.
MAX_OPERATIONS = 64 * MIN_OPERATIONS


@dataclass
class _Watch:
    """What is known of the loop.

    Attributes:
        cuts: the counter of cuts at the last look; another value means that the program cut.
        blocks: how often `storage.PENDING_BLOCK` new storages were pending since that cut.
        usual_blocks: how many of them a step has that the program ends itself.
        due: the serial after which the next cut comes; None before a loop is found.
        period: how many serials lie between two cuts.
        calls: calls of `_watch_and_cut`, each of which takes a serial.
        entries: the operations of the last period; None before the first one ended.
        has_warned: whether the user knows.
    """

    cuts: float = 0.0
    blocks: int = 0
    usual_blocks: int = 0
    due: int | None = None
    period: int = 0
    calls: int = 0
    entries: list[Entry] | None = field(default=None, repr=False)
    has_warned: bool = False


class _ThreadState(threading.local):
    inside = False


_watch = _Watch()
_thread = _ThreadState()


def install() -> None:
    """Has storages report when many are pending."""
    storage.on_pending_block = _on_pending_block


def reset() -> None:
    """Forgets the loop that is watched, and that the warning was given."""
    global _watch
    _stop()
    _watch = _Watch()


def _on_pending_block() -> None:
    """Has the pending operations looked at by the next call, at doubling distances."""
    cuts = counters.counter("cuts")
    if cuts != _watch.cuts:
        _watch.usual_blocks = max(_watch.usual_blocks, _watch.blocks)
        _watch.cuts, _watch.blocks = cuts, 0
    _watch.blocks += 1
    is_power_of_two = not _watch.blocks & (_watch.blocks - 1)
    if (
        is_power_of_two
        and _watch.blocks > _watch.usual_blocks
        and _installed() is router.route
        and execution.cut_guard is None
    ):
        # In the middle of an operation nothing may be cut: some of its values have no tensor yet.
        XLAShardedTensor.__torch_dispatch__ = classmethod(_watch_and_cut)  # type: ignore[assignment, method-assign]


def _installed() -> Any:
    return XLAShardedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]


def _stop() -> None:
    """Brings the router back."""
    if _installed() is _watch_and_cut:
        XLAShardedTensor.__torch_dispatch__ = classmethod(router.route)  # type: ignore[assignment, method-assign]
    _watch.due, _watch.entries, _watch.calls, _watch.blocks = None, None, 0, 0


def _watch_and_cut(
    cls: type[XLAShardedTensor],
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Calls the router; cuts before an operation that no other one is part of, where one is due."""
    if _thread.inside:
        return router.route(cls, func, types, args, kwargs)
    with storage.lock:
        _cut_if_due()
    _thread.inside = True
    try:
        return router.route(cls, func, types, args, kwargs)
    finally:
        _thread.inside = False


def _cut_if_due() -> None:
    if counters.counter("cuts") != _watch.cuts or execution.cut_guard is not None:
        _stop()
        return
    _watch.calls += 1
    recorded = take_serial() - _watch.calls
    if (_watch.due is not None and recorded < _watch.due) or _is_inside_an_operation():
        return
    live = storage.pending()
    nodes, _ = planning.collect(live)
    if _watch.due is None:
        _look(live, nodes)
    else:
        _cut_period(nodes)


def _is_inside_an_operation() -> bool:
    """Whether the router is at work further up, called before `_watch_and_cut` was installed."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code is router.route.__code__:
            return True
    return False


def _look(live: list[storage.Storage], nodes: list[Value]) -> None:
    """Cuts what is pending if it is a loop, and plans the next cut; else stops watching."""
    blocks = _watch.blocks
    found = repetition.find(nodes) if len(nodes) >= MIN_OPERATIONS else None
    states = [s.value for s in live if s.committed is not None]
    if found is not None and (
        len(nodes) >= MIN_STATELESS or repetition.has_steps(nodes, found, states)
    ):
        _warn(len(nodes), "as one program for each step")
        positions = repetition.boundaries(nodes, found)
        end = nodes[positions[-1] - 1].serial
        period = repetition.serials_between(nodes, found)
        try:
            execution.cut_pieces(live, nodes, positions, found.period)
        except BaseException:
            _stop()
            raise
        _watch.period, _watch.cuts, _watch.blocks = period, counters.counter("cuts"), 0
        # The calls since the last piece have taken serials, too.
        _watch.due, _watch.calls = end + period + _watch.calls, 0
        return
    _stop()
    _watch.blocks = blocks
    if len(nodes) >= MAX_OPERATIONS:
        _warn(len(nodes), "here")
        execution.cut()


def _cut_period(nodes: list[Value]) -> None:
    """Cuts at the end of a period, unless the program does something else by now."""
    entries = [node.entry for node in nodes]
    if _watch.entries is not None and entries != _watch.entries:
        _stop()
        return
    counters.count("automatic_cuts")
    execution.cut()
    assert _watch.due is not None
    _watch.due += _watch.period
    _watch.entries, _watch.cuts = entries, counters.counter("cuts")


def _warn(number: int, how: str) -> None:
    if _watch.has_warned:
        return
    _watch.has_warned = True
    warnings.warn(
        f"a step ends with spmd.sync() or a read; {number:,} operations were pending without one, "
        f"and run {how} now, with the same values. Call spmd.sync() at the end of each step.",
        UserWarning,
        stacklevel=2,
    )
