"""Cuts in a loop that records step after step without a `sync()` or a read.

One program of all its steps would take minutes to compile. So the recorded graph is examined when
many operations are pending. If they repeat themselves and update a state, they are a loop: a
program for one step is compiled, and run for each step so far. From then on another
`__torch_dispatch__` counts the recorded operations and cuts after each period. Any other cut
reinstalls the router. Each thread's loop is detected by itself.
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
from spmd_core.graph import recorders, repetition, storage
from spmd_core.graph.recorders import Recorder
from spmd_core.graph.values import Entry, Value, take_serial
from spmd_core.program import cut_guard, execution, planning
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# A graph of fewer operations is never cut, whatever it repeats.
MIN_OPERATIONS = 1024
# A graph of this many operations that repeats itself is cut even if it updates no state. In a
# smaller one, the repetitions may be the layers of one step.
MIN_STATELESS = 16 * MIN_OPERATIONS
# A graph of this many operations is cut at its end, even without a repetition.
MAX_OPERATIONS = 64 * MIN_OPERATIONS


@dataclass
class _Watch:
    """What is known of a thread's loop.

    Attributes:
        is_on: whether this thread's calls are watched.
        cuts: how often the thread had cut at the last look; if the number differs, the user's
            program has cut since.
        blocks: how often `storage.PENDING_BLOCK` new storages were pending since that cut.
        usual_blocks: how many of them there are in a step that the user's program ends itself.
        due: the serial after which the next cut comes; None before a loop is found.
        period: how many serials lie between two cuts.
        calls: calls of `_watch_and_cut`, each of which takes a serial.
        entries: the operations of the last period; None before the first one ended.
        piece: how many operations the last program of `cut_pieces` had, if another look follows it;
            else 0.
    """

    is_on: bool = False
    cuts: int = 0
    blocks: int = 0
    usual_blocks: int = 0
    due: int | None = None
    period: int = 0
    calls: int = 0
    entries: list[Entry] | None = field(default=None, repr=False)
    piece: int = 0


class _ThreadState(threading.local):
    inside = False


# Whether this thread is inside of a call while a loop is watched.
# Guarded by: thread-local storage. Cleared by: the end of each call.
_thread = _ThreadState()
# Whether the user was warned.
# Guarded by: the GIL; a race warns twice. Cleared by: reset().
_has_warned = False


def install() -> None:
    """Registers to be called when many storages are pending."""
    storage.on_pending_block = _on_pending_block


def reset() -> None:
    """Forgets this thread's watched loop, and that a warning was given."""
    global _has_warned
    recorder = recorders.current()
    if recorder.watch is not None:
        _stop(recorder.watch)
    recorder.watch = None
    _has_warned = False


def _on_pending_block(recorder: Recorder) -> None:
    """Makes the next call examine the pending operations, at doubling distances."""
    if recorder.watch is None:
        recorder.watch = _Watch()
    watch: _Watch = recorder.watch
    if recorder.num_cuts != watch.cuts:
        watch.usual_blocks = max(watch.usual_blocks, watch.blocks)
        watch.cuts, watch.blocks, watch.piece = recorder.num_cuts, 0, 0
    watch.blocks += 1
    is_power_of_two = not watch.blocks & (watch.blocks - 1)
    if (
        is_power_of_two
        and watch.blocks > watch.usual_blocks
        and not watch.is_on
        and _installed() in (router.route, _watch_and_cut)
        and cut_guard.this_thread.cut_guard is None
    ):
        # No cut in the middle of an operation: some of its values have no tensor yet.
        watch.is_on = True
        XLAShardedTensor.__torch_dispatch__ = classmethod(_watch_and_cut)  # type: ignore[assignment, method-assign]


def _installed() -> Any:
    return XLAShardedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]


def _stop(watch: _Watch) -> None:
    """Stops watching this loop; reinstalls the router if no other loop is watched."""
    watch.is_on = False
    if _installed() is _watch_and_cut and not any(
        recorder.watch is not None and recorder.watch.is_on for recorder in recorders.elsewhere()
    ):
        XLAShardedTensor.__torch_dispatch__ = classmethod(router.route)  # type: ignore[assignment, method-assign]
    watch.due, watch.entries, watch.calls, watch.blocks = None, None, 0, 0


def _watch_and_cut(
    cls: type[XLAShardedTensor],
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Calls the router; if a cut is due, cuts before an outermost operation."""
    recorder = recorders.current()
    if _thread.inside or recorder.watch is None or not recorder.watch.is_on:
        return router.route(cls, func, types, args, kwargs)
    with recorders.lock:
        _cut_if_due(recorder, recorder.watch)
    _thread.inside = True
    try:
        return router.route(cls, func, types, args, kwargs)
    finally:
        _thread.inside = False


def _cut_if_due(recorder: Recorder, watch: _Watch) -> None:
    if recorder.num_cuts != watch.cuts or cut_guard.this_thread.cut_guard is not None:
        _stop(watch)
        return
    watch.calls += 1
    recorded = take_serial() - watch.calls
    if (watch.due is not None and recorded < watch.due) or _is_inside_an_operation():
        return
    live = storage.pending()
    nodes, _ = planning.collect(live)
    if watch.due is None:
        _look(recorder, watch, live, nodes)
    else:
        _cut_period(recorder, watch, nodes)


def _is_inside_an_operation() -> bool:
    """Whether a call of the router from before `_watch_and_cut` was installed is on the stack."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code is router.route.__code__:
            return True
    return False


def _look(
    recorder: Recorder, watch: _Watch, live: list[storage.Storage], nodes: list[Value]
) -> None:
    """Cuts what is pending if it is a loop, and plans the next cut; else stops watching."""
    blocks = watch.blocks
    found = repetition.longest(nodes) if len(nodes) >= MIN_OPERATIONS else None
    states = [s.value for s in live if s.committed is not None]
    if found is not None and (
        len(nodes) >= MIN_STATELESS or repetition.has_steps(nodes, found, states)
    ):
        _warn(len(nodes), "as one program for each step")
        piece = repetition.piece_length(found)
        # Pieces that begin as those of the last look share their program.
        positions = (
            list(range(piece, found.end - found.period + 1, piece))
            if watch.piece == piece and found.start == 0
            else repetition.boundaries(nodes, found)
        )
        end = nodes[positions[-1] - 1].serial
        period = repetition.serials_between(nodes, found)
        try:
            execution.cut_pieces(live, nodes, positions, found.period)
        except BaseException:
            _stop(watch)
            raise
        watch.period, watch.cuts, watch.blocks = period, recorder.num_cuts, 0
        if storage.pending_elsewhere():
            # Other threads take serials, too, so the end of a period is not known.
            _stop(watch)
            watch.piece = piece
            return
        # The calls since the last piece took serials, too.
        watch.due, watch.calls = end + period + watch.calls, 0
        return
    _stop(watch)
    watch.blocks = blocks
    if len(nodes) >= MAX_OPERATIONS:
        _warn(len(nodes), "here")
        execution.cut()


def _cut_period(recorder: Recorder, watch: _Watch, nodes: list[Value]) -> None:
    """Cuts at the end of a period, unless the operations have changed."""
    entries = [node.entry for node in nodes]
    if watch.entries is not None and entries != watch.entries:
        _stop(watch)
        return
    counters.count("automatic_cuts")
    execution.cut()
    assert watch.due is not None
    watch.due += watch.period
    watch.entries, watch.cuts = entries, recorder.num_cuts


def _warn(number: int, how: str) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"a step ends with spmd.sync() or a read; {number:,} operations were pending without one, "
        f"and run {how} now, with the same values. Call spmd.sync() at the end of each step.",
        UserWarning,
        stacklevel=2,
    )
