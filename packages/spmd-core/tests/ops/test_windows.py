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


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_parts_are_put_between_each_other(platform: str) -> None:
    steps, whole = (2, 1, 3), np.arange(2 * 4 * 5 * 6, dtype=np.float32).reshape(2, 4, 5, 6)
    parts = {at: jnp.asarray(whole[:, at[0] :: 2, :, at[2] :: 3]) for at in np.ndindex(*steps)}
    got = windows.interleaved(Context((), platform), parts, steps)
    np.testing.assert_array_equal(got, whole)
