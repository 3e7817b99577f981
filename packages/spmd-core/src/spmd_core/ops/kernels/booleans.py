"""Booleans as numbers, in a form that XLA multiplies as torch does."""

import jax
import jax.numpy as jnp
import numpy as np


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x.astype(dtype)`; booleans become 1 and 0 by a select.

    XLA replaces the product of a number and a converted boolean with a select: NaN times False is 0
    there, and an infinity too (docs/explanation/xla_errors.md). It leaves the product with a select
    alone.
    """
    if x.dtype == np.bool_ and jnp.issubdtype(dtype, np.inexact):
        return jnp.where(x, np.ones((), dtype), np.zeros((), dtype))
    return x.astype(dtype)
