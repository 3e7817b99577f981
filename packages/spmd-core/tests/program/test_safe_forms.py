"""The partitioner's rules hold in users' jax functions, in loops and in calls, against jax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from meshes import axis, two_axes
from tiers import crossed

import spmd_core as spmd
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.splits import Splits


def in_loops(x: jax.Array, index: jax.Array) -> jax.Array:
    """One write at one index in each kind of function that jax calls from a program."""

    def write(x: jax.Array) -> jax.Array:
        return x.at[index].add(1.0)

    x = jax.jit(write)(x)
    x, _ = jax.lax.scan(lambda carry, _: (write(carry), None), x, None, length=2)
    x = jax.lax.while_loop(lambda x: jnp.sum(x.at[index].add(0.5)) < 130, write, x)
    x = jax.lax.cond(jnp.sum(x) > 0, write, lambda x: x, x)
    with_rule = jax.custom_jvp(write)
    with_rule.defjvps(lambda tangent, out, x: tangent)
    return with_rule(x)


def test_the_rules_hold_inside_of_jaxs_loops_and_calls(mesh_1d, num_devices):
    rows = torch.arange(16.0).view(16, 1)
    index = torch.tensor([5])
    expected = in_loops(jnp.asarray(rows.numpy()), jnp.asarray(index.numpy()))
    x = spmd.mark_sharding(torch.cat([rows, rows]).to("xla"), mesh_1d, ("x",))
    result = spmd.call_jax(in_loops, x[:16].clone(), index.to("xla"))
    torch.testing.assert_close(result.cpu(), torch.tensor(expected.tolist()))


def test_equations_without_a_rule_stay_as_they_are():
    def function(x: jax.Array) -> list[jax.Array]:
        return [jnp.tanh(x) @ x.T]

    assert in_safe_forms(function, jnp.ones((3, 3)), Splits(lambda x, num: x, 2)) is None


@pytest.mark.parametrize("of_left", [(None, "x", "y"), ("y", "x"), ("x", None, "y")])
@pytest.mark.parametrize("of_right", [("x", None, "y"), ("y", None, None), (None, "y", "x")])
def test_a_product_of_a_users_jax_function(of_left, of_right):
    mesh = two_axes((2, 4))
    left, right = torch.randn(2, 4, 8, 2), torch.randn(2, 4, 8, 3)
    a, b = left.to("xla"), right.to("xla")
    spmd.mark_sharding(a, mesh, of_left)
    spmd.mark_sharding(b, mesh, of_right)
    result = spmd.call_jax(
        lambda a, b: jnp.einsum("ijka,ijkb->ab", a, b, precision="highest"), a, b
    )
    expected = torch.einsum("ijka,ijkb->ab", left, right)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)


def at_every_start(function: Callable[..., Any]) -> Callable[..., Any]:
    """A jax function at starts inside and beyond both ends."""
    return lambda x, starts: tuple(function(x, starts[i]) for i in range(4))


def put_and_read(x: jax.Array, at: jax.Array) -> jax.Array:
    y = lax.dynamic_update_slice(x, x[:, :1] * 2, (0, at))
    return y + lax.dynamic_index_in_dim(y, at, 1) + lax.dynamic_slice(y, (at, 0), (4, y.shape[1]))


JAX_FUNCTIONS = {
    "as it is": at_every_start(put_and_read),
    "recomputed": at_every_start(jax.checkpoint(put_and_read)),
    "jit": at_every_start(jax.jit(put_and_read)),
    "scan": lambda x, i: lax.scan(lambda y, at: (put_and_read(y, at), y[:, at]), x, i),
    "vmap": lambda x, i: jax.vmap(put_and_read, (None, 0))(x, i),
    "rows in batches": lambda x, i: jax.vmap(lambda r, at: r.at[at].add(r[:1], mode="clip"))(
        x, i[:, None]
    ),
    "convolution": lambda x, i: lax.conv_general_dilated(
        x[None], x[:, :4, None].repeat(3, 2), (1,), "SAME", dimension_numbers=("NCH", "IOH", "NCH")
    ),
    "bits": lambda x, i: (
        lax.reduce_or(x.astype(jnp.int32), (1,)),
        lax.reduce(x, np.float64(0), lambda a, b: a + 2 * b, (0,)) * 0,
    ),
    "windows": lambda x, i: lax.reduce_window(
        lax.stop_gradient(x), np.float64(1), lambda a, b: a * b + 0 * a, (1, 3), (1, 1), "SAME"
    ),
}


@pytest.mark.parametrize(
    ("name", "marks"), crossed([*JAX_FUNCTIONS], [(None, ("x", "y")), ("y", "x")])
)
def test_users_jax_functions_on_split_dims(name, marks):
    if spmd.global_runtime_device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh, function = spmd.Mesh(range(4), (2, 2), ("x", "y")), JAX_FUNCTIONS[name]
    rows, starts = torch.linspace(-3, 3, 32, dtype=torch.float64).view(4, 8), [2, 99, -99, 0]

    def total(x: jax.Array) -> Any:
        results = jax.tree.leaves(function(x, jnp.asarray(starts)))
        return sum(jnp.sin(y).sum() for y in results), results

    with jax.enable_x64(True):
        gradient, expected = jax.jit(jax.grad(total, has_aux=True))(rows.numpy())
    leaf = rows.to("xla").requires_grad_()
    x = spmd.mark_sharding(leaf * 1, mesh, marks)
    results = jax.tree.leaves(spmd.call_jax(function, x, torch.tensor(starts).to("xla")))
    for mine, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(mine.detach().cpu().numpy(), right, rtol=1e-9, atol=1e-9)
    if results[0].requires_grad:
        sum(y.sin().sum() for y in results if y.is_floating_point()).backward()
        np.testing.assert_allclose(leaf.grad.cpu().numpy(), gradient, rtol=1e-9, atol=1e-9)


# jax sorts with indices of uint32, whose padding XLA takes for int32. Windows over several tensors
# were split in different ways. Transforms had operands in layouts that CPUs refuse. A flip in a
# small loop has a barrier, for which XLA had no code.
@pytest.mark.parametrize(
    ("function", "marks", "of_result"),
    [
        (lambda x: lax.sort(x, dimension=1), (None, None), ("a",)),
        (lambda x: jnp.median(x, axis=0), (None, "a"), (None,)),
        (lambda x: jnp.fft.rfft(x.T).real + jnp.fft.fftn(x).imag.sum(), ("a",), (None, "a")),
        (lambda x: lax.map(lambda row: row[::-1].cumsum(0), x), (None, "a"), (None, "a")),
        (lambda x: x.at[jnp.arange(3, dtype=jnp.uint8)].add(x[1:4]), ("a",), (None, "a")),
        (
            lambda x: lax.reduce_window(
                (lax.stop_gradient(x), lax.stop_gradient(-x)),
                (np.float64(0), np.float64(-np.inf)),
                lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
                (1, 2),
                (1, 1),
                "SAME",
            )[0],
            (None, "a"),
            ("a",),
        ),
    ],
)
def test_users_jax_functions_on_dims_that_are_split_unevenly(function, marks, of_result):
    mesh, x = axis(4), torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7).roll(2, 1)

    def total(x: jax.Array) -> Any:
        result = function(x)
        return jnp.sin(result).sum(), result

    with jax.enable_x64(True):
        gradient, expected = jax.jit(jax.grad(total, has_aux=True))(x.numpy())
    leaf = x.to("xla").requires_grad_()
    result = spmd.call_jax(function, spmd.mark_sharding(leaf * 1, mesh, marks)) * 1
    spmd.mark_sharding(result, mesh, of_result)
    np.testing.assert_allclose(result.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-9)
    result.sin().sum().backward()
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), gradient, rtol=1e-9, atol=1e-9)
