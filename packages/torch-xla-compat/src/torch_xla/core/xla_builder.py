"""torch_xla.core.xla_builder: jax functions as operations of a program."""

from collections.abc import Callable, Sequence
from typing import Any

import spmd_core as spmd
from torch_xla._upstream import refused


def call_jax(
    jax_func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: str | None = None,
) -> Any:
    """`spmd_core.call_jax(jax_func, *args, **kwargs)`; differentiable.

    `name` and `override_hash` are accepted and unused: the function itself is the cache key.
    """
    return spmd.call_jax(jax_func, *args, **(kwargs or {}))


_REASON = "builds PyTorch/XLA's own computations, operation by operation"
_INSTEAD = "Write a jax function and call it with call_jax."
create_computation = refused("xla_builder.create_computation", _REASON, _INSTEAD)
create_placeholder_tensor = refused("xla_builder.create_placeholder_tensor", _REASON, _INSTEAD)
xla_computation_as_func = refused("xla_builder.xla_computation_as_func", _REASON, _INSTEAD)
