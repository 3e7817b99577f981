"""Compares one overload's lowering in jax with eager torch on the CPU: shapes, dtypes, values."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from spmd_core import dtypes
from spmd_core.ops import registry

# (rtol, atol) by dtype of the result: two correct summation orders differ by a few units in the
# last place of the accumulator.
TOLERANCE = {
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float32: (2e-5, 1e-5),
    torch.float64: (1e-9, 1e-10),
}


@dataclass(frozen=True)
class _Call:
    """A call of a lowering: a function of arrays, as a program traces it, and these arrays."""

    run: Callable[[list[Any]], list[Any]]
    arrays: list[Any]


@dataclass(frozen=True)
class _Check:
    """A call, with what it must give.

    Attributes:
        name: the overload's.
        place: the test's line.
        call: the lowering.
        expected: eager torch's results.
        tolerance: rtol and atol; None is that of the dtype.
        optimized: whether LLVM's optimizations are on.
    """

    name: str
    place: str
    call: _Call
    expected: list[torch.Tensor]
    tolerance: tuple[float | None, float | None]
    optimized: bool


# The checks of the test that runs. None: each runs at once.
_waiting: list[_Check] | None = None


def _call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[registry.Out, ...],
    key: Any = None,
) -> _Call:
    overload = registry.resolve(name)
    entry = registry.find_lowering(overload)
    assert entry is not None, f"{name} has no lowering"
    schema = {a.name: a for a in overload._schema.arguments}
    names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    traced: list[Any] = []

    def convert(arg_name: str, x: Any) -> Any:
        def leaf(y: Any) -> Any:
            if isinstance(y, torch.Tensor):
                # A copy: the test may write to its tensor before the call runs.
                resolved = y.detach().resolve_conj().resolve_neg()
                traced.append(dtypes.numpy_view(resolved.clone().contiguous()))
                return ("array", len(traced) - 1)
            scalar = "number" in str(schema[arg_name].type) or (
                isinstance(y, (int, float, complex)) and "Tensor" in str(schema[arg_name].type)
            )
            if (
                scalar
                and isinstance(y, (bool, int, float, complex))
                and arg_name not in entry.static
            ):
                traced.append(np.asarray(y))
                return ("number", len(traced) - 1, type(y))
            return ("static", y)

        if isinstance(x, (list, tuple)):
            return [leaf(y) for y in x]
        return leaf(x)

    plan = [convert(n, x) for n, x in zip(names, args)]
    kwplan = {n: convert(n, x) for n, x in kwargs.items()}

    def run(values: list[Any]) -> list[Any]:
        def value(p: Any) -> Any:
            if isinstance(p, list):
                return [value(q) for q in p]
            if p[0] == "array":
                return values[p[1]]
            return registry.Number(values[p[1]], p[2]) if p[0] == "number" else p[1]

        context = registry.Context(outs, "cpu", key)
        result = entry.function(
            context, *(value(p) for p in plan), **{n: value(p) for n, p in kwplan.items()}
        )
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return _Call(run, traced)


def _results(calls: Sequence[_Call], *, optimized: bool) -> list[list[jax.Array]]:
    """The results of several calls, in one program."""
    options = {"xla_backend_optimization_level": 3} if optimized else None

    def program(arrays: list[list[Any]]) -> list[list[Any]]:
        return [call.run(own) for call, own in zip(calls, arrays)]

    with jax.enable_x64(True):
        return jax.jit(program, compiler_options=options)([call.arrays for call in calls])


def lower(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[registry.Out, ...],
    key: Any = None,
    optimized: bool = False,
) -> list[jax.Array]:
    """The results of the jitted lowering, with Scalars traced as a program traces them."""
    (found,) = _results([_call(name, args, kwargs, outs, key)], optimized=optimized)
    return found


def check(
    name: str,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    optimized: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that the overload's lowering gives the results of eager torch on the CPU.

    Shapes and dtypes must be equal, and values equal within the tolerance. Inside of
    `in_one_program` it is asserted at its end.
    """
    expected = [
        x
        for x in pytree.tree_leaves(registry.resolve(name)(*args, **kwargs))
        if isinstance(x, torch.Tensor)
    ]
    outs = tuple(registry.Out(tuple(x.shape), x.dtype) for x in expected)
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    made = _Check(name, place, _call(name, args, kwargs, outs), expected, (rtol, atol), optimized)
    if _waiting is None:
        _compare([made])
    else:
        _waiting.append(made)


@contextmanager
def in_one_program() -> Iterator[None]:
    """Has the checks inside share a program, as to compile each takes most of their time.

    What the test monkeypatches must hold until the end.
    """
    global _waiting
    _waiting = []
    try:
        yield
        for optimized in (False, True):
            _compare([each for each in _waiting if each.optimized is optimized])
    finally:
        _waiting = None


def _compare(checks: Sequence[_Check]) -> None:
    """Runs checks that are compiled alike."""
    if not checks:
        return
    try:
        found = _results([each.call for each in checks], optimized=checks[0].optimized)
    except Exception as error:
        if len(checks) == 1:
            error.add_note(f"{checks[0].name}, checked at {checks[0].place}")
            raise
        for each in checks:
            _compare([each])
        raise
    for each, got in zip(checks, found):
        try:
            _assert_equal(each, got)
        except AssertionError as error:
            error.add_note(f"{each.name}, checked at {each.place}")
            raise


def _assert_equal(check: _Check, got: list[jax.Array]) -> None:
    name, expected = check.name, check.expected
    assert len(got) == len(expected), f"{name}: {len(got)} results instead of {len(expected)}"
    for mine, right in zip(got, expected):
        assert tuple(mine.shape) == tuple(right.shape), (
            f"{name}: shape {mine.shape} instead of {tuple(right.shape)}"
        )
        assert dtypes.to_torch(mine.dtype) == right.dtype, (
            f"{name}: dtype {mine.dtype} instead of {right.dtype}"
        )
        r, a = TOLERANCE.get(right.dtype, (2e-5, 1e-5) if right.dtype.is_complex else (0, 0))
        torch.testing.assert_close(
            dtypes.tensor_view(np.asarray(mine)),
            right.contiguous(),
            rtol=r if check.tolerance[0] is None else check.tolerance[0],
            atol=a if check.tolerance[1] is None else check.tolerance[1],
            equal_nan=True,
        )
