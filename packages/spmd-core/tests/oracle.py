"""Compares one overload's lowering in jax with eager torch on the CPU: shapes, dtypes, values."""

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


def lower(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: tuple[registry.Out, ...],
    key: Any = None,
    optimized: bool = False,
) -> list[jax.Array]:
    """The results of the jitted lowering, with Scalars traced as a program traces them."""
    overload = registry.resolve(name)
    entry = registry.find_lowering(overload)
    assert entry is not None, f"{name} has no lowering"
    schema = {a.name: a for a in overload._schema.arguments}
    names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    traced: list[Any] = []

    def convert(arg_name: str, x: Any) -> Any:
        def leaf(y: Any) -> Any:
            if isinstance(y, torch.Tensor):
                traced.append(
                    dtypes.numpy_view(y.detach().resolve_conj().resolve_neg().contiguous())
                )
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

    with jax.enable_x64(True):
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

        options = {"xla_backend_optimization_level": 3} if optimized else None
        return jax.jit(run, compiler_options=options)(traced)


def check(
    name: str,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    optimized: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that the overload's lowering gives the results of eager torch on the CPU.

    Shapes and dtypes must be equal, and values equal within the tolerance.
    """
    overload = registry.resolve(name)
    expected = [
        x for x in pytree.tree_leaves(overload(*args, **kwargs)) if isinstance(x, torch.Tensor)
    ]
    outs = tuple(registry.Out(tuple(x.shape), x.dtype) for x in expected)
    got = lower(name, args, kwargs, outs, optimized=optimized)
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
            rtol=r if rtol is None else rtol,
            atol=a if atol is None else atol,
            equal_nan=True,
        )
