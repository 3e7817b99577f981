"""The forms of strided windows over split dims hold the same elements as jax's own."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_core.ops.kernels import windows
from spmd_core.ops.registry import Context


@pytest.mark.parametrize("split_dims", [(), (-1,)], ids=["whole", "split"])
def test_zeros_come_behind_each_element(split_dims: tuple[int, ...]) -> None:
    context = Context((), "cpu", num_devices=8, split_dims=frozenset(split_dims))
    x = jnp.arange(1.0, 13).reshape(2, 3, 2)
    found = windows.dilate(context, x, (2, 3))
    expected = lax.pad(x, np.float32(0), [(0, 0, 0), (0, 0, 1), (0, 0, 2)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(windows.subsample(found, (2, 3)), x)
