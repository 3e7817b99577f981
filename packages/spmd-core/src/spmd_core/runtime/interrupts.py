"""Defers signals that arrive where an exception would be lost or leave a change half made.

Python calls the handler of a signal, which may raise (KeyboardInterrupt, SystemExit), between any
two bytecodes of the main thread. Below torch's C++ that can be the middle of a write, of a
finalizer, whose exceptions Python only prints, or of an `__exit__` that puts a mode back. So this
module wraps the handlers. It walks up the frames that were interrupted. If an exception may leave
all of them, the handler runs at once. Otherwise the signal is raised again when the outermost frame
that must be completed has returned: the frame that called it gets a trace function, which Python
calls at its next bytecode. Recording pays nothing for this.

The walk ends at code that calls the user's (a closure, a hook, a loader), which any exception may
leave.

A compilation looks for a signal between its parts, and a wait is interrupted at once. So is
everything by a signal that comes a second after one that still waits. `benchmarks/interruptions.py`
interrupts programs at random.
"""

import _signal  # type: ignore[import-not-found]  # of which `signal` is a slow wrapper
import _thread
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import jaxlib
import numpy
import torch

from spmd_core import source_lines

Function = TypeVar("Function", bound=Callable[..., Any])
Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
# A signal that arrives so long after one that still waits is handled at once, wherever Python is.
_MOST_WAIT_S = 1.0
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Functions in these files must complete what they change. They call the user's code only where the
# walk ends, and wait only in functions that are marked with `waits`.
# Guarded by: imports. Cleared by: never.
_whole_files: tuple[str, ...] = (
    *(
        _PACKAGE + name + os.sep
        for name in (
            "dispatch", "graph", "manual", "marks", "modules", "ops", "program", "recording",
            "sharding", "tensor", "torch_backend",
        )
    ),
    *(_PACKAGE + name for name in ("source_lines.py", os.path.join("runtime", "interrupts.py"))),
    *(
        _PACKAGE + os.path.join("steps", name)
        for name in ("capture" + os.sep, "closures.py", "compile.py")
    ),
    *(
        _TORCH + name.replace("/", os.sep)
        for name in (
            "_decomp/", "_library/", "_meta_registrations.py", "_ops.py", "_prims/",
            "_prims_common/", "_refs/", "_tensor.py", "amp/autocast_mode.py",
            "autograd/__init__.py", "autograd/forward_ad.py", "autograd/function.py",
            "autograd/grad_mode.py", "autograd/graph.py", "optim/ada", "optim/asgd.py",
            "optim/lbfgs.py", "optim/nadam.py", "optim/optimizer.py", "optim/radam.py",
            "optim/rmsprop.py", "optim/rprop.py", "optim/sgd.py", "optim/sparse_adam.py",
            "random.py", "utils/_contextlib.py", "utils/_python_dispatch.py",
            "utils/checkpoint.py", "utils/weak.py",
        )
    ),
)  # fmt: skip
_STANDARD = str(Path(os.__file__).parent) + os.sep
_SITE = tuple(_STANDARD + name for name in ("site-packages", "dist-packages"))
# Functions in these files must be completed while they are the innermost frame, not while they call
# others.
_WHOLE_INSIDE = tuple(_STANDARD + n for n in ("contextlib.py", "weakref.py", "_weakrefset.py"))
# Libraries below torch, jax and this package.
_BELOW = tuple(
    str(Path(module.__file__).parent) + os.sep for module in (numpy, jaxlib) if module.__file__
)
# Functions in these files that wait.
# Guarded by: imports. Cleared by: never.
_waiting_code: set[CodeType] = set()


class _Kind(Enum):
    WHOLE = "an exception must not leave it in the middle"
    INSIDE = "as WHOLE, if it is the innermost frame"
    LIBRARY = "whoever calls it decides"
    USER = "the walk ends here"


@functools.cache
def _kind(file: str) -> _Kind:
    if file.startswith(_whole_files):
        return _Kind.WHOLE
    if file in _WHOLE_INSIDE:
        return _Kind.INSIDE
    is_standard = file.startswith(_STANDARD) and not file.startswith(_SITE)
    is_library = is_standard or file.startswith(_BELOW) or source_lines.is_library(file)
    return _Kind.LIBRARY if is_library else _Kind.USER


def keep_whole(file: str) -> None:
    """Defers signals while functions of a file, of a package built on this one, run."""
    global _whole_files
    _whole_files = (*_whole_files, file)
    _kind.cache_clear()


def waits(function: Function) -> Function:
    """Marks a function that may wait long and changes nothing, so that a signal interrupts it."""
    _waiting_code.add(function.__code__)
    return function


def _outermost_whole(frame: FrameType | None) -> FrameType | None:
    """The outermost frame that an exception must not leave now; None if it may be raised."""
    innermost, found = frame, None
    # Python prints the exceptions of these, and goes on.
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in _waiting_code:
            break
        kind = _kind(code.co_filename)
        if (
            kind is _Kind.WHOLE
            or (kind is _Kind.INSIDE and frame is innermost)
            or code.co_name == "__del__"
            or code in collecting
        ):
            found = frame
        elif kind is _Kind.USER:
            break
        frame = frame.f_back
    return found


class _Deferred:
    """The signals that wait, and the frame that is watched until Python may handle them in it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Handler, int]] = []
        self._tripped: list[tuple[Handler, int]] = []  # Python will call their handlers again
        self._frame: FrameType | None = None
        self._traces: tuple[Any, bool, Any] = (None, False, None)
        self._since = 0.0

    def add(self, signals: Sequence[tuple[Handler, int]], frame: FrameType) -> None:
        """Runs handlers when Python returns to a frame, or at the next `raise_deferred()`."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += signals
        if self._frame is None:
            self._frame = frame
            self._traces = (frame.f_trace, frame.f_trace_opcodes, sys.gettrace())
            frame.f_trace, frame.f_trace_opcodes = self._on_event, True
            sys.settrace(_trace_nothing)

    def is_late(self) -> bool:
        """Whether a signal has waited for so long that the next one must not wait, too."""
        return bool(self._waiting) and time.monotonic() - self._since > _MOST_WAIT_S

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        """The trace function of the frame: raises the signals again, for Python's next check.

        An exception raised here could come between bytecodes where Python expects none, such as
        before an `__exit__`, which would then never run.
        """
        self._stop_watching()
        signals, self._waiting = self._waiting, []
        if event == "exception":  # of the call that Python comes back from, and so is this one
            try:
                _run_all(signals, frame)
            except BaseException as error:
                error.__context__ = error.__context__ or arg[1]
                raise
            return
        self._tripped += signals
        numbers = {signal.Signals(number) for _, number in signals}
        # Unpacked, as Python looks for signals after each call: it would handle them here.
        [*map(_thread.interrupt_main, numbers)]

    def _stop_watching(self) -> None:
        if self._frame is not None:
            local, opcodes, trace = self._traces  # a debugger's, perhaps
            self._frame.f_trace, self._frame.f_trace_opcodes = local, opcodes
            self._frame, self._traces = None, (None, False, None)
            sys.settrace(trace)

    def take_tripped(self, number: int) -> list[tuple[Handler, int]]:
        """The signals of a number that were tripped again."""
        found = [one for one in self._tripped if one[1] == number]
        self._tripped = [one for one in self._tripped if one[1] != number]
        return found

    def raise_here(self, frame: FrameType) -> None:
        """Runs the handlers that wait."""
        self._stop_watching()
        signals, self._waiting = self._waiting, []
        _run_all(signals, frame)


# Guarded by: nothing, as only the main thread handles signals.
# Cleared by: the run of their handlers.
_deferred = _Deferred()


def _run_all(signals: Sequence[tuple[Handler, int]], frame: FrameType | None) -> None:
    if signals:
        handler, number = signals[0]
        try:
            handler(number, frame)
        finally:  # the next one runs even if this one raises; that exception becomes its context
            _run_all(signals[1:], frame)


def _trace_nothing(frame: FrameType, event: str, arg: Any) -> None:
    """The trace function of frames that begin while a signal waits; those of others stay."""


class _Deferring:
    """A handler that runs another one, now or when Python may leave what it is in."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        functools.update_wrapper(self, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signals = _deferred.take_tripped(number) or [(self._handler, number)]
        whole = None if _deferred.is_late() else _outermost_whole(frame)
        if whole is None or whole.f_back is None:
            _run_all(signals, frame)
        else:
            _deferred.add(signals, whole.f_back)


def protect() -> None:
    """Wraps the present Python handlers of the signals that end programs.

    A program may set a handler at any time, so each cut calls this. It does nothing outside of the
    main thread, the only one in which Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if handler.__class__ is not _Deferring and callable(handler):
            signal.signal(number, _Deferring(handler))


def raise_deferred() -> None:
    """Runs deferred handlers, at a point where an exception leaves nothing half done."""
    if threading.current_thread() is threading.main_thread():
        _deferred.raise_here(sys._getframe(1))
