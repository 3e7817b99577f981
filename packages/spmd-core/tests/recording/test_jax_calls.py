"""jax functions among recorded operations, and jax arrays as tensors, against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import spmd_core as spmd


def silu(x, *, scale=1.0):
    return scale * x * jax.nn.sigmoid(x)


def several(tree, flag):
    return {
        "sum": tree["a"] + tree["b"][0],
        "index": jnp.argmax(tree["a"]),
        "flag": tree["a"] * 2 if flag else tree["a"],
    }


def same(mine, right):
    torch.testing.assert_close(mine.detach().cpu(), right.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_function_and_its_gradients(dtype):
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        x = torch.randn(4, 6, dtype=dtype).to(device).requires_grad_()
        y = (
            2 * torch.nn.functional.silu(x)
            if device == "cpu"
            else spmd.call_jax(silu, x, scale=2.0)
        )
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        results.append([y, first, second])
    for right, mine in zip(*results):
        assert mine.dtype is dtype
        torch.testing.assert_close(
            mine.detach().cpu(),
            right.detach(),
            **({"rtol": 0.1, "atol": 0.1} if dtype is torch.bfloat16 else {}),
        )


def test_complex_gradients_are_torchs():
    results = []
    for device, function in (
        ("cpu", lambda z: z * z.conj() * (1 + 2j) * z),
        ("xla", lambda z: spmd.call_jax(cubed, z)),
    ):
        torch.manual_seed(0)
        z = torch.randn(5, dtype=torch.complex64).to(device).requires_grad_()
        out = function(z)
        results.append([out, *torch.autograd.grad(out.real.sum() + 3 * out.imag.sum(), z)])
    for right, mine in zip(*results):
        same(mine, right)


def cubed(z):
    return z * jnp.conj(z) * (1 + 2j) * z


def test_trees_integers_and_other_arguments():
    a, b = torch.randn(6), torch.randn(6)
    x = a.to("xla").requires_grad_()
    out = spmd.call_jax(several, {"a": x, "b": [b.to("xla")]}, True)
    assert out["index"].item() == a.argmax().item() and not out["index"].requires_grad
    same(out["sum"], a + b)
    same(torch.autograd.grad(out["flag"].sum(), x)[0], torch.full((6,), 2.0))
    assert (
        spmd.call_jax(several, {"a": x, "b": [b.to("xla")]}, False)["flag"].tolist() == a.tolist()
    )


def test_it_is_part_of_one_program_and_traced_once(mesh_1d, num_devices):
    calls = []

    def counted(x, w):
        calls.append(x.shape)
        return x @ w

    x, w = torch.randn(8, 16), torch.randn(16, 8)
    sharded = spmd.mark_sharding(x.to("xla"), mesh_1d, ("x", None))
    weight = w.to("xla")
    compiles = spmd.metrics.counter("compiles")
    for _ in range(3):
        out = torch.relu(spmd.call_jax(counted, sharded * 2, weight))
        spmd.sync()
    assert len(calls) == 1 and spmd.metrics.counter("compiles") == compiles + 1
    same(out, torch.relu(2 * x @ w))
    assert len(out._handle.storage.value.data.sharding.device_set) == num_devices


def test_inside_a_manual_region(mesh_1d, num_devices):
    x = torch.randn(16, 4)
    mapped = spmd.shard_map(
        lambda block: spmd.call_jax(jnp.cumsum, block, axis=0), mesh_1d, [("x",)], ("x",)
    )
    same(mapped(x.to("xla")), torch.cat([part.cumsum(0) for part in x.chunk(num_devices)]))


def test_there_and_back_without_a_copy(mesh_1d):
    t = spmd.mark_sharding(torch.arange(16.0).to("xla"), mesh_1d, ("x",))
    array = spmd.to_jax(t)
    back = spmd.from_jax(array)
    assert spmd.to_jax(t) is array and spmd.to_jax(back) is array
    assert back.sharding_spec == t.sharding_spec
    same(back * 2, torch.arange(16.0) * 2)
    same(spmd.from_jax(jnp.arange(3)), torch.arange(3, dtype=torch.int32))
    np.testing.assert_array_equal(
        spmd.to_jax(torch.arange(6, device="xla").view(2, 3).t()), np.arange(6).reshape(2, 3).T
    )


def test_padding_is_cut_off(mesh_1d):
    t = spmd.mark_sharding(torch.arange(13).to("xla"), mesh_1d, ("x",))
    np.testing.assert_array_equal(spmd.to_jax(t), np.arange(13))


def defaults(x):
    return x, jnp.zeros(2), jnp.arange(2), x * jnp.ones(())


def test_dtypes_are_those_that_jax_alone_gives():
    def found(x):
        return [y.dtype for y in spmd.call_jax(defaults, x.to("xla"))]

    narrow = [torch.float32, torch.float32, torch.int32, torch.float32]
    wide = [torch.float64, torch.float64, torch.int64, torch.float64]
    x = torch.ones(2)
    assert found(x) == narrow and found(x.double()) == wide
    assert found(torch.tensor([2**40])) == [torch.int64, *wide[1:]]
    with jax.enable_x64(True):
        assert found(x) == [torch.float32, *wide[1:]]
    assert found(x) == narrow
    assert spmd.call_jax(lambda i: i + 1, torch.tensor([2**40]).to("xla")).tolist() == [2**40 + 1]


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, None), lambda _, g: (g * jnp.full(g.shape, 0.5),))


def test_a_users_backward_has_the_same_dtypes():
    x = torch.ones(3).to("xla").requires_grad_()
    spmd.call_jax(halved, x).sum().backward()
    assert x.grad.tolist() == [0.5] * 3 and x.grad.dtype is torch.float32


def test_bad_input():
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"to_jax needs a tensor on device 'xla'; got a tensor on cpu.*\.to\('xla'\)",
    ):
        spmd.to_jax(torch.ones(2))
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"call_jax needs a tensor on device 'xla'; got a tensor on cpu",
    ):
        spmd.call_jax(silu, torch.ones(2))
    with pytest.raises(TypeError, match=r"from_jax takes a computed jax.Array; got ndarray"):
        spmd.from_jax(np.ones(2))
    x = torch.ones(2, device="xla")
    with pytest.raises(TypeError, match=r"silu returned str|lambda.* returned str"):
        spmd.call_jax(lambda x: "text", x)
    with pytest.raises(TypeError, match=r"returned none"):
        spmd.call_jax(lambda x: (), x)
    with pytest.raises(TypeError, match=r"tensors or hashable; got \['XLAShardedTensor', 'set'\]"):
        spmd.call_jax(silu, x, scale={1})


def test_arrays_that_are_no_numbers_or_gone():
    keys, gone = jax.random.key(0), jnp.ones(3)
    with pytest.raises(TypeError, match=r"got random keys of dtype key.*Pass jax.random.key_data"):
        spmd.from_jax(keys)
    assert spmd.from_jax(jax.random.key_data(keys)).tolist() == [0, 0]
    copied = gone.copy()
    gone.delete()
    with pytest.raises(ValueError, match=r"got a deleted one of shape \(3,\).* a copy made before"):
        spmd.from_jax(gone)
    assert spmd.from_jax(copied).tolist() == [1.0] * 3


def test_results_that_are_constants_of_the_function():
    x = torch.ones(2, device="xla", requires_grad=True)

    def function(a):
        return 5, 2.5, True, 1j, np.arange(2), a * 2

    results = spmd.call_jax(function, x)
    assert [r.tolist() for r in results] == [5, 2.5, True, 1j, [0, 1], [2.0, 2.0]]
    assert [r.dtype for r in results[:4]] == [
        torch.int32,
        torch.float32,
        torch.bool,
        torch.complex64,
    ]
    (gradient,) = torch.autograd.grad(results[-1].sum(), x)
    assert gradient.tolist() == [2.0, 2.0]


def test_results_of_dtypes_that_torch_lacks():
    x = torch.ones(2, device="xla")
    for function in (
        lambda a: a.astype(jnp.int4),
        lambda a: jax.random.key(0),
        lambda a: np.zeros(2, jax.dtypes.float0),
    ):
        with pytest.raises(
            TypeError, match=r"has a dtype of torch; got .*, for which torch has none"
        ):
            spmd.call_jax(function, x)
