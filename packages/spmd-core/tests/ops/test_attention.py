"""The attention lowerings against eager torch's math path.

With one block and with several, for every kind of mask and every dtype.
"""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from samples import tensors
from tiers import crossed, exhaustive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import oracle
from spmd_core import dtypes
from spmd_core.ops import registry
from spmd_core.ops.kernels import flash

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
    "dtype", [torch.bfloat16, *map(exhaustive, [torch.float64, torch.float16, torch.float32])]
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
TYPICAL_MASKS = [(2, 3, 11, 17), (11, 1), (2, 1, 1, 17)]


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
    [
        GROUPED["four dims"],
        *(exhaustive(GROUPED[x], id=x) for x in ("one kv head", "three dims", "five dims")),
    ],
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


@pytest.mark.parametrize(("kind", "p"), crossed(["grouped", "heads"], [0.4, 1.0]))
def test_dropout_is_the_same_in_the_result_and_the_gradients(block, kind, p):
    """Compares with torch's formula, with the dropout mask that `attention_kept` returns."""
    shapes = GROUPED["four dims"] if kind == "grouped" else SHAPES["wide values"]
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
