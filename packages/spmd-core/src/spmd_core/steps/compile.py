"""`compile`: makes a function or a block one program, and limits what may be executed inside."""

import inspect
import re
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

from spmd_core.arguments import checked, require_int
from spmd_core.dispatch import eager
from spmd_core.errors import ProgramError, SpmdError
from spmd_core.program import compile_cache, cut_guard, execution
from spmd_core.program.compile_cache import Key
from spmd_core.program.cut_guard import CutGuard
from spmd_core.program.planning import CutPlan
from spmd_core.program.program import Program
from spmd_core.program.small_state import CapturedCall
from spmd_core.source_lines import user_line
from spmd_core.steps.capture import scalers
from spmd_core.steps.capture.captured import OF_A_BLOCK, Captured

F = TypeVar("F", bound=Callable[..., Any])
AfterStart = Callable[[CutPlan, Program], None]
# By region name, for regions with `max_different_graphs`: the keys of the programs that ran.
# Guarded by: the graph lock. Cleared by: nobody but the tests.
_keys_of_name: dict[str, list[Key]] = {}


@overload
def compile(
    f: F,
    *,
    full_graph: bool = ...,
    name: str | None = ...,
    max_different_graphs: int | None = ...,
    capture: bool = ...,
) -> F: ...
@overload
def compile(
    f: None = None,
    *,
    full_graph: bool = ...,
    name: str | None = ...,
    max_different_graphs: int | None = ...,
    capture: bool = ...,
) -> "StepProgram": ...
@checked()
def compile(
    f: Any = None,
    *,
    full_graph: bool = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    capture: bool = False,
) -> Any:
    """A function or a block whose operations become one program.

    The step ends, as with `sync()`, before the region and after it; eager mode is off inside. Use
    it as `compile(f)`, as a decorator with or without arguments, or as `with compile():`. Does not
    wait for the device. If an exception leaves the region, the operations that it recorded stay
    pending.

    Without `capture`, the Python code runs each time. With it, calls of a function run the program
    of earlier ones, without Python's recording, once two calls in a row agree: they start the same
    program, and its inputs come from the same places. Arguments, parameters, buffers, the
    optimizer's state and random seeds are those of each call. Before each such call, all that the
    function reaches by closures, globals, attributes and arguments is compared; a call to which
    anything is new is recorded again: another shape or sharding, `model.eval()`, another parameter,
    another number. A number that an optimizer keeps in its `param_groups`, such as a learning rate
    that a scheduler sets, is read at each call. Tensors of the CPU among the arguments are moved to
    the device. What the function returns is detached.

    Args:
        f: the function, or None.
        full_graph: whether to forbid execution inside, for instance by reading a value that the
            region computes.
        name: the beginning of the names of programs (`metrics.programs()`, profiles); by default
            the function's name.
        max_different_graphs: how many different programs may run under the name. The programs of a
            step usually stay the same after its first two or three calls.
        capture: whether calls that agree are replayed; it implies `full_graph`, and needs a
            function.

    Raises:
        CaptureError: with `capture`, when a call is recorded: it does what no replay would do
            (prints, draws random numbers on the host, changes what it reaches, keeps a tensor that
            it made), a number varies that no `param_groups` has, or calls never come to agree. The
            call itself is complete.
        ProgramError: when the region runs: a program was executed in spite of `full_graph`, or more
            than `max_different_graphs` different programs were needed.
        ValueError: `max_different_graphs` is not positive, or there is neither a name nor a
            function whose programs it limits.
        TypeError: `f` is a generator or a coroutine; or with `capture`, a `with` block gets it.

    Example:
        >>> import torch
        >>> @compile(full_graph=True)
        ... def double(x):
        ...     return x * 2
        >>> double(torch.ones(2, device="xla")).tolist()
        [2.0, 2.0]
    """
    if f is not None and not callable(f):
        raise TypeError(
            f"a function or None is compiled; got {f!r}, of type {type(f).__name__}. "
            "Write compile(f), or `with compile():` around a block."
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"a program's name is a text; got {name!r}, of type {type(name).__name__}. "
            "Write for instance name='train'."
        )
    region = StepProgram(
        full_graph=full_graph or capture, name=name, max_different_graphs=max_different_graphs
    )
    if not capture:
        return region if f is None else region(f)
    return _Capturing(region) if f is None else region.captured(f)


class _Capturing:
    """The decorator that `compile(capture=True)` returns without a function."""

    def __init__(self, region: "StepProgram") -> None:
        self._region = region

    def __call__(self, f: Callable[..., Any]) -> Captured:
        return self._region.captured(f)

    def __enter__(self) -> NoReturn:
        raise TypeError(OF_A_BLOCK)

    def __exit__(self, *error: object) -> None:
        """Makes this a context manager for Python, which `__enter__` refuses."""


def step() -> "StepProgram":
    """One step of a loop as a context manager: `compile()` without arguments."""
    return compile()


class StepProgram(ContextDecorator):
    """The context manager and decorator that `compile` returns without a function."""

    def __init__(
        self, *, full_graph: bool, name: str | None, max_different_graphs: int | None
    ) -> None:
        if max_different_graphs is not None and (
            require_int("max_different_graphs", max_different_graphs) < 1
        ):
            raise ValueError(
                "max_different_graphs is a number of programs, at least 1; "
                f"got {max_different_graphs!r}. Leave it out for no limit."
            )
        self._full_graph, self._name, self._max_graphs = full_graph, name, max_different_graphs
        self._is_inside = False
        self._after_start: AfterStart | None = None
        self._call: CapturedCall | None = None

    def _recreate_cm(self) -> "StepProgram":
        # A function may call itself, or run in several threads: each call needs its own region.
        return StepProgram(
            full_graph=self._full_graph, name=self._name, max_different_graphs=self._max_graphs
        )

    def __call__(self, f: F) -> F:
        return super(StepProgram, self._named(f)).__call__(f)

    def captured(self, f: Callable[..., Any]) -> Captured:
        """The function whose calls are recorded in this region, and then replayed."""
        named = self._named(f)

        def region(
            run: Callable[[], CapturedCall], after_start: Callable[[CutPlan, Program], None]
        ) -> None:
            own = named._recreate_cm()
            own._after_start = after_start
            with own:
                own._call = run()

        return Captured(f, region)

    def _named(self, f: Callable[..., Any]) -> "StepProgram":
        """The region with the function's name, if it has none."""
        if (
            inspect.isgeneratorfunction(f)
            or inspect.iscoroutinefunction(f)
            or inspect.isasyncgenfunction(f)
        ):
            raise TypeError(
                "a compiled function runs from its call to its return; "
                f"got {f.__qualname__}, which runs in pieces. Write `with compile():` inside."
            )
        name = self._name or getattr(f, "__qualname__", type(f).__name__)
        return StepProgram(
            full_graph=self._full_graph, name=name, max_different_graphs=self._max_graphs
        )

    def __enter__(self) -> None:
        if self._max_graphs is not None and self._name is None:
            raise ValueError(
                "max_different_graphs counts the programs of one name; got none. "
                "Pass name=..., or decorate a function."
            )
        if self._is_inside:
            raise SpmdError(
                "a region is entered once at a time; got one that is being entered inside itself. "
                "Write `with compile():` for the inner one."
            )
        self._was_eager = eager.is_eager_mode()
        execution.end_step()
        eager.eager_mode(False)
        self._outer_guard, self._is_inside = cut_guard.this_thread.cut_guard, True
        label = re.sub(r"\W+", "_", self._name or "spmd").strip("_")
        cut_guard.this_thread.cut_guard = CutGuard(
            label or "spmd",
            self._check_cut,
            self._check_program,
            self._count_program,
            self._after_start,
            lambda: self._call,
        )

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
            cut_guard.this_thread.cut_guard = self._outer_guard
            eager.eager_mode(self._was_eager)

    def _check_cut(self) -> None:
        if self._full_graph and self._is_inside:
            raise ProgramError(
                f"under full_graph=True nothing is executed inside {self._text()}; "
                f"{user_line()} needs a value that the region computes. "
                "Move it after the region, or leave out full_graph."
                f"{scalers.ADVICE if scalers.is_reading() else ''}"
            )
        if self._outer_guard is not None:
            self._outer_guard.before_cut()

    def _check_program(self, key: Key) -> None:
        if self._outer_guard is not None:
            self._outer_guard.before_program(key)
        if self._max_graphs is None or self._name is None:
            return
        known = _keys_of_name.get(self._name, [])
        if key in known:
            return
        if len(known) >= self._max_graphs:
            nearest = min(known, key=lambda other: len(compile_cache.changed(key, other)))
            raise ProgramError(
                f"at most {self._max_graphs} different programs may run in {self._text()}; "
                "another one came up, which differs from the nearest "
                f"of them in {_differences(key, nearest)}. "
                "Give inputs the same shapes, dtypes and shardings, or raise max_different_graphs."
            )

    def _count_program(self, key: Key) -> None:
        if self._outer_guard is not None:
            self._outer_guard.after_program(key)
        if self._max_graphs is None or self._name is None:
            return
        known = _keys_of_name.setdefault(self._name, [])
        if key not in known:
            known.append(key)

    def _text(self) -> str:
        return "the region" if self._name is None else f"the region {self._name!r}"


def _differences(new: Key, old: Key) -> str:
    """The fields in which two keys differ, each with its first differing element."""
    found = []
    for name in compile_cache.changed(new, old):
        a, b = getattr(new, name), getattr(old, name)
        place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        values = [repr(x[place]) if place < len(x) else "nothing" for x in (a, b)]
        found.append(f"{name} ({values[0]} in place of {values[1]})")
    return ", ".join(found)
