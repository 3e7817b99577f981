"""torch_xla.core.xla_builder: jax functions as operations of a program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import spmd_core as spmd
from spmd_core.arguments import require_kind
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

    Raises:
        TypeError: `args` is no list, or `kwargs` no dict of names.
    """
    require_kind("args", args, list, tuple, write="the arguments in a tuple")
    named = {} if kwargs is None else kwargs
    require_kind("kwargs", named, Mapping, write="a dict of keyword arguments")
    for name_of in named:
        require_kind("a name in kwargs", name_of, str, write="a dict of keyword arguments")
    return spmd.call_jax(jax_func, *args, **named)


_REASON = "builds PyTorch/XLA's own computations, operation by operation"
_INSTEAD = "Write a jax function and call it with call_jax."
create_computation = refused("xla_builder.create_computation", _REASON, _INSTEAD)
create_placeholder_tensor = refused("xla_builder.create_placeholder_tensor", _REASON, _INSTEAD)
xla_computation_as_func = refused("xla_builder.xla_computation_as_func", _REASON, _INSTEAD)
