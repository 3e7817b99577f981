"""Adam's correction of averages that begin at zero, 1 - beta**count, by platform."""

import jax
import jax.numpy as jnp
import numpy as np


def bias_correction(
    beta: jax.Array, count: jax.Array, *, compute: np.dtype, platform: str
) -> jax.Array:
    """1 - beta**count: float64, or float32 on TPUs for updates in float32.

    TPUs have no float64: XLA computes a power in it by thousands of float32 operations, which take
    its compiler a second and some hundred megabytes for each parameter of a model.

    Args:
        beta: 0-dim, float64, from 0 up to and without 1.
        count: steps, at least 1, of any shape and float dtype.
        compute: the dtype of the update.
        platform: of the devices.
    """
    if platform == "tpu" and compute == np.float32:
        return in_float32(beta, count)
    return 1 - beta ** count.astype(np.float64)


def in_float32(beta: jax.Array, count: jax.Array) -> jax.Array:
    """1 - beta**count in float32, to a relative 4e-7 for any beta.

    1 - beta is exact to float32 where beta itself, near 1, is not.
    """
    log = jnp.log1p(-(1 - beta).astype(np.float32))
    return -jnp.expm1(count.astype(np.float32) * log)
