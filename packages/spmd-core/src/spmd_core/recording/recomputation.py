"""Keeps the values that a forward's recomputation records apart from those of its first run.

Gradient checkpointing runs a forward again in backward, so as not to keep its values until then.
The compiler sees both runs in one program, and would merge them into one. So inside `recomputing`
each value from outside is read through an optimization barrier: the compiler does not know that a
barrier returns its operand.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jax import lax

from spmd_core.graph import values
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.values import Entry, OpResult, Value
from spmd_core.ops.barrier import BARRIER
from spmd_core.program import automatic
from spmd_core.recording.calls import known
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


class _Recomputation:
    """One recomputation: replaces the operands that it records by values behind barriers.

    Pending values that this run has not recorded are read through a barrier, and so are the
    arguments. Other data on the device, such as parameters, is read directly, as it is in memory
    anyway.
    """

    def __init__(self, arguments: Sequence[Value], after: Value | None) -> None:
        self._arguments, self._after = arguments, after
        self._apart: dict[Value, Value] = {}
        self._own: set[Value] = set()

    def __call__(self, node: Value, operands: Sequence[Value]) -> Sequence[Value]:
        self._own.add(node)
        return tuple(self._own_or_apart(value) for value in operands)

    @property
    def after(self) -> Value | None:
        """The value that the program computes before this run."""
        return self._after

    def _own_or_apart(self, value: Value) -> Value:
        node = value.parent or value
        if value.data is None and node in self._own:
            return value
        # Weights that are drawn once a search has their shardings are inputs by then.
        if automatic.is_input(value) and not any(value is a for a in self._arguments):
            return value
        found = self._apart.get(value)
        if found is None:
            found = self._apart[value] = self._behind_barrier(value)
        return found

    def _behind_barrier(self, value: Value) -> Value:
        """The value behind a barrier that also waits for `after`."""
        operands = (value,) if self._after is None else (value, self._after)
        specs = tuple(operand.spec for operand in operands)
        entry = known(
            ("recomputation", specs),
            lambda: Entry(BARRIER, _barrier, specs, structure=tuple(range(len(specs)))),
        )
        with _running(None):
            return OpResult(Value(entry, operands, ()), 0)


def _barrier(context: Any, inputs: list[Any], numbers: list[Any]) -> list[Any]:
    return list(lax.optimization_barrier(tuple(inputs)))


# The innermost recomputation of each thread.
# Guarded by: the graph lock. Cleared by: the end of the run.
_runs: dict[int, _Recomputation] = {}


def _operands(node: Value, operands: Sequence[Value]) -> Sequence[Value]:
    run = _runs.get(threading.get_ident())
    return operands if run is None else run(node, operands)


@contextmanager
def _running(run: _Recomputation | None) -> Iterator[None]:
    """Inside, this is the innermost recomputation of this thread."""
    around = _set(run)
    try:
        yield
    finally:
        _set(around)


def _set(run: _Recomputation | None) -> _Recomputation | None:
    """Sets the innermost recomputation of this thread; returns the former one."""
    with lock:
        around = _runs.pop(threading.get_ident(), None)
        if run is not None:
            _runs[threading.get_ident()] = run
        values.recomputation = _operands if _runs else None
        return around


@contextmanager
def recomputing(arguments: Sequence[Any], after: torch.Tensor | None) -> Iterator[None]:
    """Inside, what this thread records is the recomputation of a function.

    Args:
        arguments: of the function; tensors on device `xla` among them are read through a barrier,
            wherever their data lies.
        after: a tensor on device `xla`; the program computes it before it starts the recomputation.
    """
    with lock:
        given = [read(t._handle) for t in arguments if isinstance(t, XLAShardedTensor)]
        last = read(after._handle) if isinstance(after, XLAShardedTensor) else None
    with _running(_Recomputation(given, last)):
        yield


def awaited() -> list[XLAShardedTensor]:
    """The tensor that this thread's recomputation waits for, in a list; empty without one."""
    running = _runs.get(threading.get_ident())
    if running is None or running.after is None:
        return []
    return [wrap(Storage(running.after, running.after.spec))]
