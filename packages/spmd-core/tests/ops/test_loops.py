"""`loops.scan` gives what `lax.scan` gives, and counts in int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_core.ops.kernels import loops


def step(state, slices):
    total, _ = state
    x, index = slices["x"], slices["index"]
    return (total + x * index, x), (total, {"double": 2 * x})


XS = {"x": np.arange(12.0).reshape(4, 3), "index": np.arange(4)}
START = (jnp.ones(3), jnp.zeros(3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_it_gives_what_jaxs_scan_gives(length, reverse):
    xs = {name: x[:length] for name, x in XS.items()}
    found = jax.jit(lambda: loops.scan(step, START, xs, reverse=reverse))()
    expected = lax.scan(step, START, xs, reverse=reverse)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_without_slices_it_has_a_length():
    state, made = loops.scan(lambda state, _: (state * 2, None), jnp.ones(()), None, length=5)
    assert state == 32
    assert made is None


def test_it_counts_in_int32():
    """libtpu sees no number of iterations where a loop counts in int64."""
    text = jax.jit(lambda: loops.scan(step, START, XS)[0]).lower().as_text()
    (condition,) = [line for line in text.splitlines() if "compare" in line]
    assert "tensor<i32>" in condition
