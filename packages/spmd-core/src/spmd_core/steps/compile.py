"""`compile`: a function or a block as one program, with a cut before it and one after it, and promises about the programs in between."""

import inspect
import re
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar, overload

from spmd_core.dispatch import eager
from spmd_core.errors import ProgramError, SpmdError
from spmd_core.program import compile_cache, execution
from spmd_core.program.compile_cache import Key
from spmd_core.program.execution import Watch
from spmd_core.source_lines import user_line

F = TypeVar("F", bound=Callable[..., Any])
# The programs that ran under each name whose number is limited.
_met: dict[str, list[Key]] = {}


@overload
def compile(
    f: F, *, full_graph: bool = ..., name: str | None = ..., max_different_graphs: int | None = ...
) -> F: ...
@overload
def compile(
    f: None = None,
    *,
    full_graph: bool = ...,
    name: str | None = ...,
    max_different_graphs: int | None = ...,
) -> "StepProgram": ...
def compile(
    f: Any = None,
    *,
    full_graph: bool = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """A function, or a block, whose operations become one program: the step ends (as with `sync()`) before it and after it. Eager mode is off inside.

    Use it as `compile(f)`, as a decorator with or without arguments, or as `with compile():`. Nothing is traced or captured: Python runs each time.
    Does not wait for the device. Where an exception leaves the region, what was recorded stays pending.

    Args:
        f: the function, or None.
        full_graph: nothing may be executed inside, for instance by reading a value that the region computes.
        name: begins the names of programs (`metrics.programs()`, profiles); by default the function's.
        max_different_graphs: how many different programs may run under the name. A step meets its final programs in the first two or three calls.

    Raises:
        ProgramError: when the region runs: something was executed in spite of `full_graph`, or one program more than `max_different_graphs` came up.
        ValueError: `max_different_graphs` is not positive, or there is neither a name nor a function to count programs under.
        TypeError: `f` is a generator or a coroutine.

    Example:
        >>> import torch
        >>> @compile(full_graph=True)
        ... def double(x):
        ...     return x * 2
        >>> double(torch.ones(2, device="xla")).tolist()
        [2.0, 2.0]
    """
    region = StepProgram(
        full_graph=full_graph, name=name, max_different_graphs=max_different_graphs
    )
    return region if f is None else region(f)


def allow_execution(allow: bool) -> None:
    """With False, whatever would execute a program raises, until it is called with True: a way to find hidden reads of values.

    Raises:
        SpmdError: inside a region of `compile`, which has its own `full_graph`.
        ProgramError: later, at the line that needs a value.
    """
    if execution.watch not in (None, _refusing):
        raise SpmdError(
            "a region says itself whether it may execute; got allow_execution inside one. Use compile(full_graph=True)."
        )
    execution.watch = None if allow else _refusing


def _refuse_anywhere() -> None:
    raise ProgramError(
        f"after allow_execution(False) nothing is executed; {user_line()} needs a value that is pending. Move it, or call allow_execution(True)."
    )


_refusing = Watch("spmd", _refuse_anywhere, lambda key: None)


def step() -> "StepProgram":
    """One step of a loop, as a context: what `compile` gives without arguments."""
    return compile()


class StepProgram(ContextDecorator):
    """What `compile` returns without a function: a context manager and a decorator."""

    def __init__(
        self, *, full_graph: bool, name: str | None, max_different_graphs: int | None
    ) -> None:
        if max_different_graphs is not None and (
            not isinstance(max_different_graphs, int) or max_different_graphs < 1
        ):
            raise ValueError(
                f"max_different_graphs is a number of programs, at least 1; got {max_different_graphs!r}. Leave it out for no limit."
            )
        self._full_graph, self._name, self._max_graphs = full_graph, name, max_different_graphs
        self._is_inside = False

    def _recreate_cm(self) -> "StepProgram":
        # A function may call itself, or run in several threads: each call has a region of its own.
        return StepProgram(
            full_graph=self._full_graph, name=self._name, max_different_graphs=self._max_graphs
        )

    def __call__(self, f: F) -> F:
        if (
            inspect.isgeneratorfunction(f)
            or inspect.iscoroutinefunction(f)
            or inspect.isasyncgenfunction(f)
        ):
            raise TypeError(
                f"a compiled function runs from its call to its return; got {f.__qualname__}, which runs in pieces. Write `with compile():` inside."
            )
        name = self._name or getattr(f, "__qualname__", type(f).__name__)
        named = StepProgram(
            full_graph=self._full_graph, name=name, max_different_graphs=self._max_graphs
        )
        return super(StepProgram, named).__call__(f)

    def __enter__(self) -> None:
        if self._max_graphs is not None and self._name is None:
            raise ValueError(
                "max_different_graphs counts the programs of one name; got none. Pass name=..., or decorate a function."
            )
        if self._is_inside:
            raise SpmdError(
                "a region is entered once at a time; got one that is being entered inside itself. Write `with compile():` for the inner one."
            )
        self._was_eager = eager.is_eager_mode()
        execution.end_step()
        eager.eager_mode(False)
        self._outside, self._is_inside = execution.watch, True
        label = re.sub(r"\W+", "_", self._name or "spmd").strip("_")
        execution.watch = Watch(label or "spmd", self._refuse_inside, self._count)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_inside = False
        try:
            if kind is None:
                execution.end_step()
        finally:
            execution.watch = self._outside
            eager.eager_mode(self._was_eager)

    def _refuse_inside(self) -> None:
        if self._full_graph and self._is_inside:
            raise ProgramError(
                f"under full_graph=True nothing is executed inside {self._text()}; {user_line()} needs a value that the region computes. "
                "Move it behind the region, or leave out full_graph."
            )
        if self._outside is not None:
            self._outside.before_cut()

    def _count(self, key: Key) -> None:
        if self._outside is not None:
            self._outside.before_program(key)
        if self._max_graphs is None or self._name is None:
            return
        known = _met.setdefault(self._name, [])
        if key in known:
            return
        if len(known) >= self._max_graphs:
            nearest = min(known, key=lambda other: len(compile_cache.changed(key, other)))
            raise ProgramError(
                f"at most {self._max_graphs} different programs may run in {self._text()}; another one came up, which differs from the nearest "
                f"of them in {_differences(key, nearest)}. Give inputs the same shapes, dtypes and shardings, or raise max_different_graphs."
            )
        known.append(key)

    def _text(self) -> str:
        return "the region" if self._name is None else f"the region {self._name!r}"


def _differences(new: Key, old: Key) -> str:
    """The ingredients in which two keys differ, each with the first place that does."""
    found = []
    for name in compile_cache.changed(new, old):
        a, b = getattr(new, name), getattr(old, name)
        place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        values = [repr(x[place]) if place < len(x) else "nothing" for x in (a, b)]
        found.append(f"{name} ({values[0]} in place of {values[1]})")
    return ", ".join(found)
