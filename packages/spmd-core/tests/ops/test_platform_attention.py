"""The kernels that platforms have for attention: which takes which call, and what they compute.

The tests run on the CPU, so they check when a kernel is chosen, that it lowers, how it is
partitioned, and the values of a kernel that can be interpreted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from samples import tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from spmd_core import dtypes
from spmd_core.ops import attention, registry
from spmd_core.ops.kernels import flash, platform_attention


def text_for(
    platform: str,
    lowering_platform: str,
    dtype: Any,
    *,
    q=(2, 4, 256, 64),
    kv=(2, 2, 256, 64),
    is_causal=True,
    backward=False,
    num_devices=1,
    layout=None,
    documents=False,
) -> str:
    """The StableHLO of attention (or its backward) for a platform that need not be present."""
    gqa = q[1] != kv[1]
    torch_dtype = dtypes.to_torch(np.dtype(dtype))

    def forward(query, key, value, ids=None):
        ctx = registry.Context(
            (registry.Out((*q[:-1], kv[-1]), torch_dtype),),
            platform,
            num_devices=num_devices,
            hint=layout,
        )
        return attention._attention_lse(
            ctx, query, key, value, ids, None, 0.0, is_causal, None, gqa
        )

    def both(query, key, value, ids=None):
        out, lse = forward(query, key, value, ids)
        ctx = registry.Context(
            (registry.Out(q, torch_dtype),), platform, num_devices=num_devices, hint=layout
        )
        return attention._attention_backward(
            ctx,
            out,
            query,
            key,
            value,
            ids,
            out,
            lse,
            None,
            0.0,
            is_causal,
            None,
            gqa,
            [True, True, True, False],
        )

    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in (q, kv, kv)]
    if documents:
        shapes.append(jax.ShapeDtypeStruct((q[0], q[2]), np.int64))
    with jax.enable_x64(True):
        traced = jax.jit(both if backward else forward).trace(*shapes)
        return traced.lower(lowering_platforms=(lowering_platform,)).as_text()


@pytest.fixture
def hopper(monkeypatch):
    """Replaces the checks for cuDNN and a GPU that jax makes when it traces."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(
        fused_attention_stablehlo, "check_compute_capability", lambda capability: True
    )
    monkeypatch.setattr(platform_attention, "_cuda_capability", lambda: 9.0)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_gpus_use_cudnn(hopper, dtype):
    assert "__cudnn$fmhaSoftmax" in text_for("gpu", "cuda", dtype)
    text = text_for("gpu", "cuda", dtype, backward=True)
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float32, {}),
        (jnp.bfloat16, {"q": (2, 4, 256, 60), "kv": (2, 2, 256, 60)}),
        (jnp.bfloat16, {"q": (2, 4, 256, 264), "kv": (2, 2, 256, 264)}),
        (jnp.bfloat16, {"q": (2, 4, 128, 64)}),
        (jnp.bfloat16, {"q": (4, 256, 64), "kv": (4, 256, 64)}),
    ],
)
def test_gpus_use_blocks_where_cudnn_declines(hopper, dtype, options):
    assert "cudnn" not in text_for("gpu", "cuda", dtype, backward=True, **options)


@pytest.mark.parametrize(
    ("capability", "dim", "takes"),
    [(None, 64, False), (7.5, 64, False), (8.0, 128, True), (8.0, 136, False), (9.0, 256, True)],
)
def test_what_cudnn_takes(capability, dim, takes):
    x = jnp.zeros((1, 1, 1, 16, dim), jnp.bfloat16)
    assert (
        platform_attention._cudnn_takes(
            flash.AttentionOptions(16, 16, 1.0, True, 0.0), x, x, capability
        )
        is takes
    )


def test_a_gpu_that_is_not_nvidias_has_no_cudnn(monkeypatch):
    class Gfx:
        compute_capability = "gfx942"

    monkeypatch.setattr(jax, "devices", lambda: [Gfx()])
    assert platform_attention._cuda_capability() is None


def test_tpus_use_splash_attention():
    assert "tpu_custom_call" in text_for("tpu", "tpu", jnp.bfloat16)
    assert "tpu_custom_call" in text_for("tpu", "tpu", jnp.bfloat16, backward=True)
    assert "tpu_custom_call" not in text_for(
        "tpu", "tpu", jnp.bfloat16, backward=True, num_devices=2
    )
    assert "tpu_custom_call" not in text_for("tpu", "tpu", np.float32, backward=True)
    assert "tpu_custom_call" not in text_for(
        "tpu", "tpu", jnp.bfloat16, q=(2, 4, 200, 64), kv=(2, 2, 200, 64), backward=True
    )


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [4, 3])
def test_tpus_use_splash_attention_on_a_mesh(batch, kv_heads, num_devices):
    """Each device has its rows of the batch and its heads; also with fewer heads of keys."""
    if num_devices != 8:
        pytest.skip("the mesh is of eight devices")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    layout = registry.AttentionLayout(mesh, ("data",), ("tensor",))
    shapes = {"q": (batch, 4, 256, 64), "kv": (batch, kv_heads, 256, 64)}
    text = text_for(
        "tpu", "tpu", jnp.bfloat16, backward=True, num_devices=8, layout=layout, **shapes
    )
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert kernels
    # A device's block: two batch elements (of three: one is filled up) of one head.
    assert all("tensor<2x1x256x64xbf16>" in line for line in kernels)


def test_a_kernel_in_a_manual_region_computes_what_the_whole_does(num_devices):
    if num_devices < 2:
        pytest.skip("one device has nothing to split")
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "tensor"))
    layout = registry.AttentionLayout(mesh, ("data",), ("tensor",))
    options = flash.AttentionOptions(16, 16, 1.0, True, 0.0)
    arrays = [
        np.random.default_rng(0).normal(size=s).astype(np.float32)
        for s in ((5, 4, 2, 16, 8), (5, 4, 16, 8), (5, 4, 16, 8))
    ]

    def kernel(*given):
        return flash.forward(options, *given, None, None)

    found = jax.jit(lambda *given: platform_attention._per_block(layout, kernel, *given))(*arrays)
    for mine, right in zip(found, kernel(*map(jnp.asarray, arrays))):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_splash_attention_computes_what_the_blocks_do(is_causal):
    query, key, value = tensors(torch.bfloat16, (1, 4, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64))
    with sdpa_kernel(SDPBackend.MATH):
        right = scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=True
        )
    options = flash.AttentionOptions(256, 256, 0.125, is_causal, 0.0)
    q, k, v = (jnp.asarray(dtypes.numpy_view(x)) for x in (query, key, value))
    out, lse = platform_attention._splash(
        options, q.reshape(1, 2, 2, 256, 64), k, v, differentiable=False, interpret=True
    )
    _, lse_of_blocks = flash.forward(options, q.reshape(1, 2, 2, 256, 64), k, v, None, None)
    torch.testing.assert_close(
        dtypes.tensor_view(np.asarray(out)).reshape(right.shape), right, rtol=6e-2, atol=6e-2
    )
    np.testing.assert_allclose(np.asarray(lse), np.asarray(lse_of_blocks), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_splash_attention_keeps_documents_apart(is_causal):
    query, key, value = tensors(torch.bfloat16, (2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64))
    ids = torch.tensor([[3] * 100 + [1] * 156, [0] * 17 + [2] * 139 + [-1] * 100])
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    if is_causal:
        mask = mask.tril()
    with sdpa_kernel(SDPBackend.MATH):
        right = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    options = flash.AttentionOptions(256, 256, 0.125, is_causal, 0.0)
    q, k, v = (jnp.asarray(dtypes.numpy_view(x)) for x in (query, key, value))
    out, _ = platform_attention._splash(
        options,
        q.reshape(2, 2, 2, 256, 64),
        *(k, v, jnp.asarray(ids.numpy(), np.int32)),
        differentiable=False,
        interpret=True,
    )
    torch.testing.assert_close(
        dtypes.tensor_view(np.asarray(out)).reshape(right.shape), right, rtol=6e-2, atol=6e-2
    )


def test_a_manual_region_splits_the_ids_by_the_batch(num_devices):
    if num_devices < 2:
        pytest.skip("one device has nothing to split")
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "tensor"))
    layout = registry.AttentionLayout(mesh, ("data",), ("tensor",))
    options = flash.AttentionOptions(16, 16, 1.0, True, 0.0)
    generator = np.random.default_rng(0)
    arrays = [
        generator.normal(size=s).astype(np.float32)
        for s in ((5, 4, 2, 16, 8), (5, 4, 16, 8), (5, 4, 16, 8))
    ]
    ids = np.sort(generator.integers(0, 4, (5, 16)).astype(np.int32))

    def kernel(query, key, value, ids):
        rows = ids[:, None, None, :, None]
        mask = flash.Documents(rows, rows.swapaxes(-1, -2))
        return flash.forward(options, query, key, value, mask, None)

    found = jax.jit(lambda *given: platform_attention._per_block(layout, kernel, *given))(
        *arrays, ids
    )
    for mine, right in zip(found, kernel(*map(jnp.asarray, (*arrays, ids)))):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "on"), [("tpu", "tpu"), ("gpu", "cuda")])
def test_which_kernels_take_documents(platform, on, hopper):
    """Splash attention takes ids; cuDNN's kernel takes none, so GPUs compute blocks."""
    kernels = {"tpu": "tpu_custom_call", "gpu": "__cudnn"}
    text = text_for(platform, on, jnp.bfloat16, backward=True, documents=True)
    assert (kernels[platform] in text) == (platform == "tpu")
    assert kernels[platform] in text_for(platform, on, jnp.bfloat16, backward=True)


def test_an_opaque_kernel_is_split_over_batch_and_heads(num_devices, monkeypatch):
    """The wrapper that hides the kernels of cuDNN and splash attention from the partitioner.

    Here it wraps the blockwise attention.
    """
    if num_devices < 2:
        pytest.skip("one device has nothing to split")
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "tensor"))
    monkeypatch.setattr(flash, "MAX_BLOCK", 8)  # several blocks, hence a table of block pairs
    options = flash.AttentionOptions(16, 16, 1.0, True, 0.0)
    shapes: list[tuple[int, ...]] = []

    def kernel(query, key, value):
        shapes.append(query.shape)
        return flash.forward(options, query, key, value, None, None)

    heads = mesh.shape["tensor"]
    arrays = [
        np.random.default_rng(0).normal(size=s).astype(np.float32)
        for s in ((4, heads, 2, 16, 8), (4, heads, 16, 8), (4, heads, 16, 8))
    ]
    right = flash.forward(options, *map(jnp.asarray, arrays), None, None)
    for spec in (
        PartitionSpec("data", "tensor"),
        PartitionSpec("data", None, "tensor" if heads == 2 else None),
        PartitionSpec(None, "tensor"),
    ):
        placed = [
            jax.device_put(
                x,
                NamedSharding(
                    mesh, spec if x.ndim == 5 or len(spec) < 3 else PartitionSpec(*spec[:2])
                ),
            )
            for x in arrays
        ]
        compiled = (
            jax.jit(lambda *args: platform_attention._per_shard(kernel, *args))
            .lower(*placed)
            .compile()
        )
        for mine, other in zip(compiled(*placed), right):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
        if len(spec) == 2:
            assert "all-gather" not in compiled.as_text()
    assert (2, 1, 2, 16, 8) in shapes
