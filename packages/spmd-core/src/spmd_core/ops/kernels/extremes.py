"""Maxima and minima over devices that propagate NaN, by integers in the order of the floats.

XLA's collectives on CPUs, and NCCL's, compare floats one by one and may drop a NaN. Read as
signed integers, the bits of positive floats have the order of the floats, and those of negative
floats the reverse order, so these are inverted. NaN is an integer beyond those of all floats.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_INTEGERS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def with_nan(reduce: Callable[[jax.Array], jax.Array], x: jax.Array, *, is_max: bool) -> jax.Array:
    """A maximum or minimum, `reduce`, of floats; NaN where one of them is NaN.

    Args:
        reduce: takes an array and returns one of the same dtype, each of whose elements is the
            largest (smallest) of some elements.
        x: floats of 16, 32 or 64 bits.
        is_max: whether `reduce` is the maximum.
    """
    integer = _INTEGERS[x.dtype.itemsize]
    limits = jnp.iinfo(integer)

    def invert_negatives(bits: jax.Array) -> jax.Array:
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    beyond = limits.max if is_max else limits.min
    bits = lax.bitcast_convert_type(x, integer)
    reduced = reduce(jnp.where(jnp.isnan(x), beyond, invert_negatives(bits)))
    return lax.bitcast_convert_type(invert_negatives(reduced), x.dtype)
