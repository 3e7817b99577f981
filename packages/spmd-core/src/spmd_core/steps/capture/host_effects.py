"""What a step does on the host beside recording, which no replay would do: it is an error."""

import datetime
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

from spmd_core import source_lines
from spmd_core.errors import CaptureError
from spmd_core.recording import random_stream
from spmd_core.steps.capture.reachable import is_users

# Functions of the standard library that a step of the user's must not call, by what they do.
# Guarded by: nothing, as it never changes. Cleared by: never.
_CALLS: dict[Any, str] = {
    **dict.fromkeys(
        (
            time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic,
            time.monotonic_ns, time.process_time, time.sleep,
        ),
        "read of the clock",
    ),
    **dict.fromkeys((print, input), "print"),
    **dict.fromkeys((open, io.open, os.open, os.system), "file or process"),
    os.urandom: "random number of the host",
}  # fmt: skip
_CLOCKS = frozenset({"now", "utcnow", "today"})
_ADVICE = (
    "A captured step runs its Python only when it is recorded. Do it outside of the step, with "
    "what it returns or gets"
)


class Effects:
    """What a step does on the host, noted while it is recorded.

    Attributes:
        found: each effect, with its line.
        draws: the seeds that the step drew, each behind its generator.
    """

    def __init__(self, draws: list[tuple[torch.Generator | None, int]]) -> None:
        self.found: list[str] = []
        self.draws = draws
        self._torch = torch.get_rng_state()
        self._others = _states()

    def refuse(self) -> None:
        """Raises for the first effect.

        Raises:
            CaptureError: there is one.
        """
        if self.found:
            raise CaptureError(
                f"a captured step only computes on the device; got a {self.found[0]}. {_ADVICE}."
            )
        number = sum(generator is None for generator, _ in self.draws)
        changed = [name for name, old, new in zip(_NAMES, self._others, _states()) if old != new]
        if not torch.equal(torch.get_rng_state(), random_stream.advanced(self._torch, number)):
            changed.append("torch on the CPU")
        if changed:
            raise CaptureError(
                "a captured step draws random numbers on the device; got numbers of "
                f"{changed[0]}. Write torch.rand(..., device='xla'), or draw them outside and pass "
                "them."
            )


_NAMES = ("Python's random", "numpy.random")


def _states() -> tuple[Any, Any]:
    state: Any = np.random.get_state()
    return random.getstate(), (state[1].tobytes(), state[2:])


@contextmanager
def noted() -> Iterator[Effects]:
    """Yields what the code inside does on the host."""
    with random_stream.listening() as draws:
        effects = Effects(draws)
        before = sys.stdout, sys.stderr
        is_free = sys.getprofile() is None  # a profiler of the user's keeps its place
        sys.stdout, sys.stderr = (_Stream(stream, effects.found) for stream in before)
        if is_free:
            sys.setprofile(_noting(effects.found))
        try:
            yield effects
        finally:
            if is_free:
                sys.setprofile(None)
            sys.stdout, sys.stderr = before


def _noting(found: list[str]) -> Callable[[FrameType, str, Any], None]:
    own = threading.get_ident()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not is_users(frame.f_code.co_filename):
            return
        try:
            what = _CALLS.get(called)
        except TypeError:  # a method of what has no hash
            return
        if what is None and called.__name__ in _CLOCKS:
            is_clock = isinstance(called.__self__, type) and issubclass(
                called.__self__, datetime.date
            )
            what = "read of the clock" if is_clock else None
        if what is not None and threading.get_ident() == own:
            found.append(f"{what} at {frame.f_code.co_filename}:{frame.f_lineno}")

    return note


class _Stream:
    """stdout or stderr; notes the lines of the user's program that write there."""

    def __init__(self, stream: Any, found: list[str]) -> None:
        self._stream, self._found = stream, found

    def write(self, text: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "warnings":
            self._found.append(f"print at {source_lines.user_line()}")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
