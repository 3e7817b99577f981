"""What a step does on the host beside recording, which no replay would do: it is an error."""

import datetime
import io
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from spmd_core import source_lines
from spmd_core.errors import CaptureError
from spmd_core.recording import random_stream
from spmd_core.steps.capture import code_names
from spmd_core.steps.capture.code_names import is_users

# Functions of the standard library that a step of the user's must not call, by what they do.
# Guarded by: nothing, as it never changes. Cleared by: never.
_CALLS: dict[Any, str] = {
    **dict.fromkeys(
        (
            time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic,
            time.monotonic_ns, time.process_time, time.process_time_ns, time.thread_time,
            time.localtime, time.gmtime, time.ctime, time.strftime, time.sleep,
        ),
        "read of the clock",
    ),
    **dict.fromkeys((print, input), "print"),
    **dict.fromkeys((open, io.open, os.open, os.system), "file or process"),
    os.urandom: "random number of the host",
}  # fmt: skip
# Their functions draw from the host's randomness for whoever calls them.
_RANDOM_FILES = frozenset(f"{os.sep}{name}.py" for name in ("random", "secrets", "uuid"))
_LOG = logging.Logger._log.__code__
_CLOCKS = frozenset({"now", "utcnow", "today"})
_ADVICE = (
    "A captured step runs its Python only when it is recorded. Do it outside of the step, with "
    "what it returns or gets"
)


class Effects:
    """What a step does on the host, noted while it is recorded.

    Attributes:
        found: each effect, with its line.
        draws: the seeds that were drawn.
        codes: the code that ran.
        group_readers: code of the user's, among it, that reads an optimizer's param_groups.
    """

    def __init__(self, draws: random_stream.Draws) -> None:
        self.found: list[str] = []
        self.draws = draws
        self.codes: set[CodeType] = set()
        self.group_readers: set[CodeType] = set()
        self._torch = torch.get_rng_state()
        self._others = _states()

    def seeds(self) -> list[tuple[torch.Generator | None, int]]:
        """The seeds that were drawn, each once: a checkpoint draws those of its forward again."""
        found = {(_identity(generator), seed): generator for generator, seed in self.draws.own}
        return [(generator, seed) for (_, seed), generator in found.items()]

    def refuse(self, generators: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
        """Raises for the first effect.

        Args:
            generators: those that the step reaches, each with its state before the step.

        Raises:
            CaptureError: there is one.
        """
        if self.found:
            raise CaptureError(
                f"a captured step only computes on the device; got a {self.found[0]}. {_ADVICE}."
            )
        used = {_identity(None), *(_identity(generator) for generator, _ in generators)}
        for generator, thread in self.draws.others:
            if _identity(generator) in used:
                raise CaptureError(
                    "while a captured step is recorded, no other thread draws random numbers from "
                    f"the generators that it may use; got draws by thread {thread!r}. Pass that "
                    "thread a torch.Generator of its own, or record the step before it starts."
                )
        draws = self.seeds()
        number = sum(generator is None for generator, _ in draws)
        changed = [name for name, old, new in zip(_NAMES, self._others, _states()) if old != new]
        if not torch.equal(torch.get_rng_state(), random_stream.advanced(self._torch, number)):
            changed.append("torch on the CPU")
        for generator, state in generators:
            number = sum(_identity(of) == _identity(generator) for of, _ in draws)
            advanced = random_stream.advanced(state, number)
            if not torch.equal(generator.get_state(), advanced):
                changed.append("a generator of torch on the CPU")
        if changed:
            raise CaptureError(
                "a captured step draws random numbers on the device; got numbers of "
                f"{changed[0]}. Write torch.rand(..., device='xla'), or draw them outside and pass "
                "them."
            )


_NAMES = ("Python's random", "numpy.random")


def _identity(generator: torch.Generator | None) -> int:
    """The same for all objects that torch makes for a generator."""
    found: int = 0 if generator is None else generator._cdata  # type: ignore[attr-defined]
    return found


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
        own = threading.get_ident()
        sys.stdout, sys.stderr = (_Stream(stream, effects.found, own) for stream in before)
        if is_free:
            sys.setprofile(_noting(effects))
        try:
            yield effects
        finally:
            if is_free:
                sys.setprofile(None)
            sys.stdout, sys.stderr = before


def _noting(effects: Effects) -> Callable[[FrameType, str, Any], None]:
    found, codes = effects.found, effects.codes

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code is _LOG:
                caller = _outside(frame, (logging.__file__,))
                if is_users(caller.f_code.co_filename):
                    found.append(f"log record at {_line(caller)}")
            elif frame.f_code not in codes:
                codes.add(frame.f_code)
                if _reads_groups(frame):
                    effects.group_readers.add(frame.f_code)
            return
        if event != "c_call":
            return
        if called is os.urandom:
            frame = _outside(frame, _RANDOM_FILES)
        if not is_users(frame.f_code.co_filename):
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
        if isinstance(getattr(called, "__self__", None), io.IOBase):
            what = "file or process"
        if what is not None:
            found.append(f"{what} at {_line(frame)}")

    return note


def _outside(frame: FrameType, files: Collection[str]) -> FrameType:
    """The innermost frame that is in none of some files, which end so."""
    while frame.f_back is not None and frame.f_code.co_filename.endswith(tuple(files)):
        frame = frame.f_back
    return frame


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _reads_groups(frame: FrameType) -> bool:
    """Whether code of the user's may decide by the numbers of an optimizer's param_groups.

    An optimizer's own code computes with them; it decides by them if it compares them.
    """
    code = frame.f_code
    if "param_groups" not in code.co_names or not is_users(code.co_filename):
        return False
    is_own = isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
    return not is_own or code_names.compares(code)


class _Stream:
    """stdout or stderr; notes the lines of the user's program that write there."""

    def __init__(self, stream: Any, found: list[str], thread: int) -> None:
        self._stream, self._found, self._thread = stream, found, thread

    def write(self, text: str) -> Any:
        is_own = threading.get_ident() == self._thread
        if is_own and sys._getframe(1).f_globals.get("__name__") != "warnings":
            self._found.append(f"print at {source_lines.user_line()}")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
