"""The attention lowerings against eager torch's math path, and the platforms' kernels.

With one block and with several, for every kind of mask and every dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiers import crossed, exhaustive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import oracle
from spmd_core import dtypes
from spmd_core.ops import attention, registry
from spmd_core.ops.kernels import flash, platform_attention

# Two correct orders of summation differ by some units in the last place of the probabilities, which
# the lowering rounds once more than the math path for 16-bit inputs.
TOLERANCE = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (6e-2, 6e-2),
    torch.float32: (1e-4, 2e-5),
    torch.float64: (1e-9, 1e-10),
}


@pytest.fixture(params=[8, 512], ids=["blocks of 8", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", request.param)


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def lowered(name: str, *args: Any) -> list[torch.Tensor]:
    """The results of an spmd overload's lowering; asserts the meta kernel's shapes and dtypes."""

    def to_meta(x: Any) -> Any:
        return x.detach().to("meta") if isinstance(x, torch.Tensor) else x

    overload = registry.resolve(name)
    metas = overload(*map(to_meta, args))
    metas = [metas] if isinstance(metas, torch.Tensor) else list(metas)
    if name.startswith("spmd.attention_backward"):
        metas = [m for m, yes in zip(metas, args[-1]) if yes]
    outs = tuple(registry.Out(tuple(m.shape), m.dtype) for m in metas)
    got = oracle.lower(name, args, {}, outs)
    for x, out in zip(got, outs):
        assert (x.shape, dtypes.to_torch(x.dtype)) == (out.shape, out.dtype)
    return [dtypes.tensor_view(np.asarray(x)) for x in got]


def eager(query, key, value, mask, grad, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Eager torch's result, and the gradients of all floating inputs."""
    inputs = [
        x.detach().requires_grad_(x.is_floating_point())
        for x in (query, key, value, mask)
        if x is not None
    ]
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            *inputs[:3], attn_mask=inputs[3] if len(inputs) == 4 else None, **options
        )
    wanted = [x for x in inputs if x.requires_grad]
    return out.detach(), list(torch.autograd.grad(out, wanted, grad))


def check(query, key, value, mask=None, *, is_causal=False, scale=None, enable_gqa=False) -> None:
    rtol, atol = TOLERANCE[query.dtype]
    (grad,) = tensors(query.dtype, (*query.shape[:-1], value.shape[-1]))
    right, right_grads = eager(
        query, key, value, mask, grad, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    options = (None, 0.0, is_causal, scale, enable_gqa)
    (alone,) = lowered("spmd.attention.default", query, key, value, mask, *options)
    out, lse = lowered("spmd.attention.lse", query, key, value, mask, *options)
    torch.testing.assert_close(alone, out, equal_nan=True)
    torch.testing.assert_close(out, right, rtol=rtol, atol=atol, equal_nan=True)
    wanted = [True, True, True, mask is not None and mask.is_floating_point()]
    grads = lowered(
        "spmd.attention_backward.default", grad, query, key, value, mask, out, lse, *options, wanted
    )
    assert len(grads) == len(right_grads)
    for mine, other in zip(grads, right_grads):
        scale_of_grads = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol * scale_of_grads)


SHAPES = {
    "square": ((2, 3, 20, 8), (2, 3, 20, 8), (2, 3, 20, 8)),
    "more keys": ((2, 3, 9, 8), (2, 3, 30, 8), (2, 3, 30, 8)),
    "more queries": ((2, 3, 30, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "whole blocks": ((1, 2, 16, 8), (1, 2, 24, 8), (1, 2, 24, 8)),
    "wide values": ((2, 3, 11, 8), (2, 3, 17, 8), (2, 3, 17, 5)),
    "no batch": ((3, 11, 8), (3, 17, 8), (3, 17, 8)),
    "no heads": ((11, 8), (17, 8), (17, 8)),
    "five dims": ((2, 1, 3, 11, 8), (2, 1, 3, 17, 8), (2, 1, 3, 17, 8)),
    "one query": ((2, 3, 1, 8), (2, 3, 17, 8), (2, 3, 17, 8)),
    "one key": ((2, 3, 11, 8), (2, 3, 1, 8), (2, 3, 1, 8)),
}


@pytest.mark.parametrize(("name", "is_causal"), crossed([*SHAPES], [False, True]))
def test_shapes(block, name, is_causal):
    check(*tensors(torch.float32, *SHAPES[name]), is_causal=is_causal)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, exhaustive(torch.float16), exhaustive(torch.float32)]
)
def test_dtypes(block, dtype):
    query, key, value, mask = tensors(dtype, *SHAPES["wide values"], (3, 11, 17))
    check(query, key, value, mask)
    check(query, key, value, is_causal=True, scale=0.3)
    if dtype in (torch.float16, torch.bfloat16):
        check(query, key, value, mask.float())


MASKS = [
    (2, 3, 11, 17),
    (2, 1, 1, 17),
    (1, 3, 11, 1),
    (3, 11, 17),
    (1, 11, 17),
    (11, 17),
    (1, 17),
    (11, 1),
    (17,),
    (1,),
    (),
    (2, 3, 1, 1),
]


# One of each kind in the default tier: whole, broadcast in rows, in columns, and to heads.
TYPICAL_MASKS = [(2, 3, 11, 17), (11, 1), (17,), (2, 1, 1, 17)]


@pytest.mark.parametrize(
    "shape", [s if s in TYPICAL_MASKS else exhaustive(s, id=str(s)) for s in MASKS], ids=str
)
def test_masks(block, shape):
    query, key, value = tensors(torch.float32, *SHAPES["wide values"])
    (mask,) = tensors(torch.float32, shape)
    check(query, key, value, mask)
    check(query, key, value, mask > -0.5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_without_keys_gives_zeros(block, kind):
    query, key, value = tensors(torch.float32, *SHAPES["more keys"])
    mask = torch.ones(9, 30, dtype=torch.bool)
    mask[0], mask[4, :25], mask[8, 8:] = False, False, False
    check(
        query,
        key,
        value,
        mask if kind == "bool" else torch.zeros(9, 30).masked_fill(~mask, -torch.inf),
    )


def test_nan_and_infinity_spread_as_in_torch(block):
    query, key, value = tensors(torch.float32, *SHAPES["square"])
    query[0, 0, 3, 0], key[1, 1, 5, 2], value[1, 2, 2, 1] = torch.nan, torch.inf, torch.nan
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[:, 5] = False
    for m in (None, mask):
        with sdpa_kernel(SDPBackend.MATH):
            right = scaled_dot_product_attention(query, key, value, attn_mask=m)
        (got,) = lowered(
            "spmd.attention.default", query, key, value, m, None, 0.0, False, None, False
        )
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5, equal_nan=True)


GROUPED = {
    "four dims": ((2, 6, 11, 8), (2, 3, 17, 8), (2, 3, 17, 5)),
    "one kv head": ((2, 6, 11, 8), (2, 1, 17, 8), (2, 1, 17, 8)),
    "three dims": ((6, 11, 8), (2, 17, 8), (2, 17, 8)),
    "five dims": ((2, 2, 4, 11, 8), (2, 2, 2, 17, 8), (2, 2, 2, 17, 8)),
}


@pytest.mark.parametrize(
    "shapes",
    [GROUPED["four dims"], GROUPED["one kv head"]]
    + [exhaustive(GROUPED[name], id=name) for name in ("three dims", "five dims")],
)
def test_grouped_heads(block, shapes):
    query, key, value = tensors(torch.float32, *shapes)
    check(query, key, value, enable_gqa=True)
    check(query, key, value, enable_gqa=True, is_causal=True)
    check(query, key, value, *tensors(torch.float32, (shapes[0][-3], 11, 17)), enable_gqa=True)
    check(query, key, value, *tensors(torch.float32, (11, 17)), enable_gqa=True)


@pytest.mark.parametrize("dim", [0, 2, 3, "keys", "head dim"], ids=str)
def test_empty(dim):
    shapes = [list(s) for s in SHAPES["more keys"]]
    for i, shape in enumerate(shapes):
        if dim == "keys":
            shape[2] = 0 if i else shape[2]
        elif dim == "head dim":
            shape[3] = 0 if i < 2 else shape[3]
        elif dim == 2:
            shape[2] = shape[2] if i else 0
        else:
            shape[dim] = 0
    check(*tensors(torch.float32, *map(tuple, shapes)))


@pytest.mark.parametrize(
    "wanted", [(True, False, False, False), (False, True, False, True), (False, False, True, False)]
)
def test_only_the_gradients_that_are_asked_for(block, wanted):
    query, key, value, mask, grad = tensors(
        torch.float32, *SHAPES["more keys"], (9, 30), (2, 3, 9, 8)
    )
    _, right = eager(query, key, value, mask, grad)
    options = (None, 0.0, False, None, False)
    out, lse = lowered("spmd.attention.lse", query, key, value, mask, *options)
    grads = lowered(
        "spmd.attention_backward.default",
        grad,
        query,
        key,
        value,
        mask,
        out,
        lse,
        *options,
        list(wanted),
    )
    for mine, other in zip(grads, [g for g, yes in zip(right, wanted) if yes], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shapes", [SHAPES["wide values"], GROUPED["four dims"]], ids=["heads", "grouped"]
)
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_is_the_same_in_the_result_and_the_gradients(block, shapes, p):
    """Compares with torch's formula, with the dropout mask that `attention_kept` returns."""
    query, key, value, grad = tensors(torch.float64, *shapes, (*shapes[0][:-1], shapes[2][-1]))
    options = (7, p, True, None, shapes[0][1] != shapes[1][1])
    (kept,) = lowered("spmd.attention_kept.default", query, key, 7, p, True)
    group = query.shape[1] // key.shape[1]
    inputs = [x.requires_grad_() for x in (query, key, value)]
    scores = query @ key.repeat_interleave(group, 1).mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf).softmax(-1)
    right = (weights * kept * (0 if p == 1 else 1 / (1 - p))) @ value.repeat_interleave(group, 1)
    right_grads = torch.autograd.grad(right, inputs, grad)
    plain = [x.detach() for x in inputs]
    out, lse = lowered("spmd.attention.lse", *plain, None, *options)
    torch.testing.assert_close(out, right.detach())
    grads = lowered(
        "spmd.attention_backward.default",
        grad,
        *plain,
        None,
        out,
        lse,
        *options,
        [True, True, True, False],
    )
    for mine, other in zip(grads, right_grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_dropout_keeps_the_right_share(block):
    query, key = tensors(torch.float32, (4, 4, 64, 8), (4, 4, 64, 8))
    (kept,) = lowered("spmd.attention_kept.default", query, key, 3, 0.25, False)
    (other,) = lowered("spmd.attention_kept.default", query, key, 4, 0.25, False)
    sigma = (0.25 * 0.75 / kept.numel()) ** 0.5
    assert abs(kept.float().mean().item() - 0.75) < 5 * sigma
    assert abs((kept == other).float().mean().item() - (0.75**2 + 0.25**2)) < 5 * sigma
    # The blocks' masks are independent of each other.
    assert abs((kept[..., :32, :] == kept[..., 32:, :]).float().mean().item() - 0.625) < 8 * sigma


def test_a_causal_mask_leaves_out_empty_blocks():
    options = flash.AttentionOptions(4 * flash.MAX_BLOCK, 4 * flash.MAX_BLOCK, 1.0, True, 0.0)
    assert len(options.pairs()) == 10
    assert (
        len(
            flash.AttentionOptions(
                4 * flash.MAX_BLOCK, 4 * flash.MAX_BLOCK, 1.0, False, 0.0
            ).pairs()
        )
        == 16
    )


def test_few_queries_or_keys_make_longer_blocks():
    n = flash.MAX_BLOCK
    assert flash.AttentionOptions(1, 64 * n, 1.0, False, 0.0).key_blocks == (64 * n, 1)
    assert flash.AttentionOptions(8 * n, n // 4, 1.0, False, 0.0).query_blocks == (4 * n, 2)


def test_the_program_does_not_grow_with_the_sequence():
    def lines(n: int) -> int:
        x = jax.ShapeDtypeStruct((1, 2, 1, n, 8), np.float32)
        k = jax.ShapeDtypeStruct((1, 2, n, 8), np.float32)
        options = flash.AttentionOptions(n, n, 1.0, True, 0.0)
        return len(
            jax.jit(lambda q, k, v: flash.forward(options, q, k, v, None, None))
            .lower(x, k, k)
            .as_text()
            .splitlines()
        )

    assert lines(8192) == lines(1536)


# The platforms' own kernels. The tests run on the CPU, so they check when a kernel is chosen, that
# it lowers, how it is partitioned, and the values of a kernel that can be interpreted.


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
