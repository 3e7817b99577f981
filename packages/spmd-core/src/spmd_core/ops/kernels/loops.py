"""A loop over slices of arrays whose number of iterations every backend's compiler sees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    xs: Any,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """As `lax.scan`, but that the loop counts in int32, and has no derivative.

    With 64-bit types, `lax.scan` counts in int64, which libtpu makes a pair of uint32: it then
    does not see how often the loop runs, and neither overlaps its iterations nor prints the number.

    Args:
        step: (state, slices of the first dim of each of xs) -> (state, what is stacked).
        state: the first state, a tree of arrays.
        xs: a tree of arrays of shape (length, ...).
        length: the number of iterations; needed where xs has no arrays.
        reverse: whether the last slice comes first.

    Returns:
        The last state, and what was stacked, in the order of xs.
    """
    arrays, of_xs = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))
    count = length if length is not None else len(arrays[0])
    each = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in arrays]
    traced, (_, made) = jax.make_jaxpr(step, return_shape=True)(
        state, jax.tree.unflatten(of_xs, each)
    )
    results, of_made = jax.tree.flatten(made)
    stacks = [lax.full((count, *y.shape), 0, y.dtype) for y in results]
    if not count:
        return state, jax.tree.unflatten(of_made, stacks)
    call = jaxpr_as_fun(traced)
    leaves, of_state = jax.tree.flatten(state)

    def body(looped: Any) -> Any:
        i, leaves, stacks = looped
        at = np.int32(count - 1) - i if reverse else i
        options: Any = {"allow_negative_indices": False}
        slices = [lax.dynamic_index_in_dim(x, at, 0, keepdims=False, **options) for x in arrays]
        results = call(*leaves, *slices)
        leaves, ys = results[: len(leaves)], results[len(leaves) :]
        stacks = [
            lax.dynamic_update_index_in_dim(stack, y, at, 0, **options)
            for stack, y in zip(stacks, ys)
        ]
        return i + np.int32(1), leaves, stacks

    start = (np.int32(0), leaves, stacks)
    _, leaves, stacks = lax.while_loop(lambda looped: looped[0] < np.int32(count), body, start)
    return jax.tree.unflatten(of_state, leaves), jax.tree.unflatten(of_made, stacks)
