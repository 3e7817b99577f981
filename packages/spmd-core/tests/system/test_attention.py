"""`scaled_dot_product_attention` on the device.

It is recorded whole, differentiated and partitioned, uses little memory, and refuses what torch
refuses.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import crossed, exhaustive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

import spmd_core as spmd
from spmd_core.ops.kernels import flash
from spmd_core.program import compilation


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setattr(spmd.config, "strict", True)


def both(function, *inputs, rtol=1e-4, atol=2e-5):
    """Asserts that `function` and its gradients agree on the CPU and on the device."""
    results, strides = [], []
    for device in ("cpu", "xla"):
        args = [
            None if x is None else x.detach().to(device).requires_grad_(x.requires_grad)
            for x in inputs
        ]
        out = function(*args)
        wanted = [x for x in args if x is not None and x.requires_grad]
        grads = torch.autograd.grad((out * out).sum(), wanted) if wanted else ()
        results.append([out.detach().cpu(), *(g.cpu() for g in grads)])
        strides.append(out.stride())
    assert strides[0] == strides[1]
    for mine, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=rtol, atol=atol)


def random(*shapes, dtype=torch.float32, grad=True):
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    kind=st.sampled_from(["none", "causal", "bool", "float"]),
    mask_dims=st.integers(0, 15),
    scale=st.sampled_from([None, 0.5]),
    grad=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_everything_agrees_with_the_cpu(
    batch, kv_heads, group, queries, keys, kind, mask_dims, scale, grad
):
    heads = kv_heads * group
    query, key, value = random(
        (batch, heads, queries, 4),
        (batch, kv_heads, keys, 4),
        (batch, kv_heads, keys, 3),
        grad=grad,
    )
    full = (batch, heads, queries, keys)
    mask = None
    if kind in ("bool", "float"):
        mask = torch.randn([n if mask_dims >> d & 1 else 1 for d, n in enumerate(full)])
        mask = mask > -1 if kind == "bool" else mask.requires_grad_(grad)

    def run(q, k, v, m):
        with sdpa_kernel(
            [SDPBackend.MATH]
            if q.device.type == "cpu"
            else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
        ):
            return attend(
                q, k, v, attn_mask=m, is_causal=kind == "causal", scale=scale, enable_gqa=group > 1
            )

    both(run, query, key, value, mask)


BROADCAST = [
    ((2, 3, 4, 8), (1, 3, 5, 8), (1, 3, 5, 8)),
    ((1, 3, 4, 8), (2, 3, 5, 8), (1, 3, 5, 8)),
    ((2, 3, 4, 8), (3, 5, 8), (3, 5, 8)),
    ((2, 6, 4, 8), (2, 1, 5, 8), (2, 1, 5, 8)),
    ((2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    ((4, 8), (3, 5, 8), (3, 5, 8)),
]


@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
def test_leading_dims_broadcast(shapes):
    both(attend, *random(*shapes))


def test_key_and_value_may_have_different_numbers_of_heads():
    both(
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        *random((2, 6, 4, 8), (2, 3, 5, 8), (2, 2, 5, 8)),
    )
    both(
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        *random((2, 6, 4, 8), (1, 3, 5, 8), (1, 3, 5, 8)),
    )


def test_one_kv_head_is_not_repeated():
    """It is a group with one kv head, so no tensor with all query heads is made from it."""
    q, k, v = (x.to("xla") for x in random((2, 8, 16, 8), (2, 1, 16, 8), (2, 1, 16, 8), grad=False))
    out = attend(q, k, v)
    assert [i.spec.shape[1] for i in out._handle.value.inputs] == [8, 1, 1]


def test_strides_and_views():
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)  # the output of a fused projection
    both(lambda x: attend(*x.unbind(2)), qkv)
    both(lambda x: attend(*(y.transpose(1, 2) for y in x.unbind(2)), is_causal=True), qkv)
    x = torch.randn(2, 4, 5, 8, requires_grad=True)
    both(lambda x: attend(x, x, x), x)
    both(lambda x: attend(x[:, :, ::2], x.flip(2), x.expand(2, 4, 5, 8)), x)


def test_forward_is_one_operation_and_backward_another():
    q, k, v = (x.to("xla") for x in random((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), grad=False))
    out = attend(q, k, v)
    assert out._handle.value.entry.name == "spmd::attention"
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves, is_causal=True).sum(), leaves)
    assert {g._handle.value.parent.entry.name for g in grads} == {"spmd::attention_backward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (
        x.to("xla").requires_grad_()
        for x in random((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), grad=False)
    )
    with torch.autocast("xla", dtype=dtype):
        out = attend(q, k, v, attn_mask=torch.zeros(4, 5, device="xla"))
    assert out.dtype == dtype
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(
        out.detach().cpu().float(), attend(q.cpu(), k.cpu(), v.cpu()).detach(), rtol=3e-2, atol=3e-2
    )


@pytest.mark.parametrize(("dropout_p", "masked"), crossed([0.0, 0.3, 1.0], [False, True]))
def test_the_gradient_can_be_differentiated(dropout_p, masked):
    q, k, v = (
        x.detach().to("xla").requires_grad_()
        for x in random((1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 4), dtype=torch.float64)
    )
    mask = torch.randn(5, 6, dtype=torch.float64).to("xla").requires_grad_() if masked else None
    inputs = [x for x in (q, k, v, mask) if x is not None]

    def first(create_graph):
        torch.manual_seed(3)
        out = attend(q, k, v, attn_mask=mask, dropout_p=dropout_p, enable_gqa=True)
        return torch.autograd.grad(out.square().sum(), inputs, create_graph=create_graph)

    through_math, ours = first(True), first(False)
    for a, b in zip(through_math, ours, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.cpu())
    second = torch.autograd.grad(
        sum(g.square().sum() for g in through_math), inputs, allow_unused=True
    )
    # Compare with central differences along one direction.
    direction = torch.randn(q.shape, dtype=torch.float64).to("xla")
    start, step = q.detach().clone(), 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            q.copy_(start + sign * step * direction)
        values.append(sum(g.square().sum() for g in first(False)).item())
    slope = 0.0 if second[0] is None else (second[0] * direction).sum().item()
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-6)


# torch's forward-mode decompositions raise this warning.
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_forward_mode_goes_through_torchs_composition():
    q, k, v, t = (
        x.detach().to("xla")
        for x in random((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 5, 4), dtype=torch.float64)
    )
    _, tangent = torch.func.jvp(lambda x: attend(x, k, v), (q,), (t,))
    with sdpa_kernel(SDPBackend.MATH):
        _, right = torch.func.jvp(lambda x: attend(x, k.cpu(), v.cpu()), (q.cpu(),), (t.cpu(),))
    torch.testing.assert_close(tangent.cpu(), right)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_operation_without_gradients(mode):
    q, k, v = (x.detach() for x in random((1, 2, 5, 4), (1, 2, 6, 4), (1, 2, 6, 4)))
    with mode():
        out = attend(q.to("xla"), k.to("xla"), v.to("xla"))
        assert out._handle.value.entry.name.startswith("spmd::attention")
        torch.testing.assert_close(out.cpu(), attend(q, k, v), rtol=1e-4, atol=1e-5)


# torch 2.15's CPU kernel, from which the values to compare with come, has no batching rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_transforms():
    q, k, v = (x.detach() for x in random((3, 2, 5, 4), (3, 2, 6, 4), (3, 2, 6, 4)))

    def loss(q, k, v):
        return attend(q, k, v).square().sum()

    right = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    got = torch.func.vmap(torch.func.grad(loss))(q.to("xla"), k.to("xla"), v.to("xla"))
    torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-5)


def test_only_the_math_backend():
    q, k, v = (x.to("xla") for x in random((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), grad=False))
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(q, k, v)
    assert out._handle.value.entry.name != "spmd::attention"
    torch.testing.assert_close(out.cpu(), attend(q, k, v).cpu())
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attend(q, k, v)._handle.value.entry.name == "spmd::attention"


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_the_differentiable_backward_has_the_mask(kind):
    q, k, v = random((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4), dtype=torch.float64)
    mask = (
        torch.ones(5, 5, dtype=torch.bool).tril() if kind == "bool" else torch.randn(5, 5).double()
    )

    def grads(inputs, mask):
        out = attend(*inputs, attn_mask=mask)
        return torch.autograd.grad(out.square().sum(), inputs, create_graph=True)

    leaves = [x.detach().to("xla").requires_grad_() for x in (q, k, v)]
    for got, right in zip(grads(leaves, mask.to("xla")), grads([q, k, v], mask)):
        torch.testing.assert_close(got.detach().cpu(), right.detach())


# Dropout.


def drop(q, k, v, seed, **options):
    torch.manual_seed(seed)
    return attend(q, k, v, dropout_p=0.25, **options)


def test_dropout_is_reproducible_and_unbiased(monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", 24)  # several blocks
    n = 50
    q, k = (torch.zeros(8, 8, n, 4).to("xla") for _ in range(2))
    # With the identity as values, the result is the matrix of probabilities.
    v = torch.eye(n).expand(8, 8, n, n).contiguous().to("xla")
    out = drop(q, k, v, 1).cpu()
    assert torch.equal(out, drop(q, k, v, 1).cpu())
    assert not torch.equal(out, drop(q, k, v, 2).cpu())
    kept = out != 0
    torch.testing.assert_close(out, kept / (n * 0.75), rtol=1e-5, atol=1e-7)
    assert abs(kept.float().mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / kept.numel())
    assert attend(q, k, v, dropout_p=1.0).cpu().abs().max() == 0


def test_dropout_compiles_once_for_all_seeds():
    q, k, v = (x.to("xla") for x in random((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8), grad=False))
    drop(q, k, v, 1).cpu()
    compiles = spmd.metrics.counter("compiles")
    drop(q, k, v, 2).cpu()
    assert spmd.metrics.counter("compiles") == compiles


def test_dropout_under_checkpoint():
    q, k, v = (
        x.to("xla").requires_grad_()
        for x in random((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8), grad=False)
    )
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(drop, q, k, v, 5, use_reentrant=False)
        else:
            out = drop(q, k, v, 5)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


# Partitioning.

LAYOUTS = {
    "one": (),
    "batch": ("a",),
    "heads": (None, "b"),
    "both": ("a", "b"),
    "sequence": ("a", None, "b"),
}


@pytest.mark.parametrize(
    ("n", "dropout_p"),
    [exhaustive(16, 0.0), exhaustive(16, 0.25), exhaustive(150, 0.0), (150, 0.25)],
)
def test_every_layout_gives_the_same(mesh_2d, num_devices, n, dropout_p, monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", 128)  # 150 are several blocks
    torch.manual_seed(1)
    shapes = ((8, 4, n, 8), (8, 2, n, 8), (8, 2, n, 8))
    inputs = [torch.randn(s) for s in shapes]
    results = {}
    for name, layout in LAYOUTS.items():
        leaves = [x.to("xla").requires_grad_() for x in inputs]
        for x in leaves:
            spmd.mark_sharding(x, mesh_2d, layout)
        torch.manual_seed(2)
        out = attend(*leaves, is_causal=True, dropout_p=dropout_p, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        spmd.sync()
        results[name] = [out.detach().cpu(), *(g.cpu() for g in grads)]
    right = results["one"]
    if dropout_p == 0:
        leaves = [x.requires_grad_() for x in inputs]
        out = attend(*leaves, is_causal=True, enable_gqa=True)
        right = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    for got in results.values():
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"dropout_p": 0.25}, {"masked": True}], ids=str
)
def test_batch_and_heads_are_not_gathered(mesh_2d, num_devices, options, compiled_text):
    if num_devices < 8:
        pytest.skip("needs a mesh of 4 x 2")
    n = 600 + len(str(options))  # a shape that no other case has: programs are cached
    options = dict(options)
    mask = torch.zeros(n, n).to("xla") if options.pop("masked", False) else None
    leaves = [torch.randn(8, 4, n, 8).to("xla").requires_grad_() for _ in range(3)]
    for x in leaves:
        spmd.mark_sharding(x, mesh_2d, ("a", "b"))
    grads = torch.autograd.grad(attend(*leaves, attn_mask=mask, **options).square().sum(), leaves)
    spmd.sync()
    text = compiled_text()
    assert "while" in text
    assert (
        "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    )
    assert f"[2,2,{n},8]" in text.replace("f32", "") or "[2,2,1," in text
    del grads


@pytest.fixture
def compiled_text(monkeypatch):
    """A function that returns the HLO of the program compiled last."""
    made = []
    analyse = compilation._analyse

    def keep(compiled, record):
        made.append(compiled)
        analyse(compiled, record)

    monkeypatch.setattr(compilation, "_analyse", keep)
    return lambda: made[-1].as_text()


# Memory.


def bytes_of_a_step(n: int) -> int:
    """The temporary bytes of a forward and a backward of causal attention over `n` positions."""
    leaves = [torch.randn(1, 2, n, 16).to("xla").requires_grad_() for _ in range(3)]
    grads = torch.autograd.grad(attend(*leaves, is_causal=True).square().sum(), leaves)
    spmd.sync()
    del grads
    return spmd.metrics.programs()[-1].temp_bytes


def test_memory_grows_with_the_sequence_not_its_square(monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", 128)
    small, large = bytes_of_a_step(1024), bytes_of_a_step(2048)
    assert large < 3 * small
    assert large < 2 * 2048 * 2048 * 4  # the bytes of the scores of two heads


# What is refused.

REFUSED = {
    "mask and causal": lambda t: attend(
        t(2, 3, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 5), attn_mask=t(4, 4) > 0, is_causal=True
    ),
    "mask of integers": lambda t: attend(
        t(2, 3, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8), attn_mask=t(4, 4).int()
    ),
    "mask of float64": lambda t: attend(
        t(2, 3, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8), attn_mask=t(4, 4).double()
    ),
    "mask size": lambda t: attend(t(2, 3, 4, 8), t(2, 3, 5, 8), t(2, 3, 5, 8), attn_mask=t(4, 3)),
    "mask dims": lambda t: attend(
        t(2, 3, 4, 8), t(2, 3, 5, 8), t(2, 3, 5, 8), attn_mask=t(1, 2, 3, 4, 5)
    ),
    "dtypes": lambda t: attend(t(2, 3, 4, 8), t(2, 3, 4, 8).half(), t(2, 3, 4, 8)),
    "integers": lambda t: attend(t(2, 3, 4, 8).int(), t(2, 3, 4, 8).int(), t(2, 3, 4, 8).int()),
    "one dim": lambda t: attend(t(8), t(8), t(8)),
    "head dims": lambda t: attend(t(2, 3, 4, 8), t(2, 3, 4, 7), t(2, 3, 4, 8)),
    "heads": lambda t: attend(t(2, 6, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8)),
    "grouped heads": lambda t: attend(t(2, 4, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8), enable_gqa=True),
    "dropout": lambda t: attend(t(2, 3, 4, 8), t(2, 3, 4, 8), t(2, 3, 4, 8), dropout_p=1.5),
}
MESSAGES = {
    "mask and causal": (
        "Explicit attn_mask should not be set when is_causal=True.*put it into the mask"
    ),
    "mask of integers": (
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask"
    ),
    "mask of float64": "Expected attn_mask dtype to be bool",
    "mask size": r"size of attn_mask must match .* got \(4, 3\) for scores \(2, 3, 4, 5\)",
    "mask dims": "size of attn_mask must match",
    "dtypes": "Expected query, key, and value to have the same dtype",
    "integers": "expected scalar type Float",
    "one dim": "Expected query, key, and value to all be at least 2 dimensional",
    "head dims": "Expected size of the last dim to agree",
    "grouped heads": "Number of heads in key and value must divide the number of heads in query",
    "dropout": "dropout probability has to be between 0 and 1, but got 1.5",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("grad", [False, True])
def test_what_torch_refuses_is_refused_at_the_call(name, grad):
    with pytest.raises(RuntimeError):
        REFUSED[name](lambda *s: torch.zeros(s, requires_grad=grad))
    with pytest.raises(RuntimeError, match=MESSAGES.get(name)):
        REFUSED[name](lambda *s: torch.zeros(s, device="xla", requires_grad=grad))


def test_key_and_value_of_different_lengths_are_refused():
    """Eager torch accepts them, and its CPU kernel reads past the end of the shorter tensor."""
    with pytest.raises(RuntimeError, match="the one before for key and value"):
        attend(*(torch.zeros(2, 3, n, 8, device="xla") for n in (4, 5, 6)))


def test_tensors_on_two_devices_are_refused():
    x = torch.zeros(2, 3, 4, 8)
    for places in itertools.product(("cpu", "xla"), repeat=3):
        if len(set(places)) == 2:
            with pytest.raises((RuntimeError, spmd.errors.DeviceMismatchError)):
                attend(*(x.to(place) for place in places))
    with pytest.raises(spmd.errors.DeviceMismatchError, match="one device"):
        attend(x.to("xla"), x.to("xla"), x.to("xla"), attn_mask=torch.zeros(4, 4))


# torch's own modules.


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(training, need_weights):
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    on_device = torch.nn.MultiheadAttention(16, 4, batch_first=True).to("xla").train(training)
    on_device.load_state_dict(layer.state_dict())
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            right = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
            got = on_device(
                x.to("xla"),
                x.to("xla"),
                x.to("xla"),
                key_padding_mask=padding.to("xla"),
                need_weights=need_weights,
            )
        torch.testing.assert_close(got[0].detach().cpu(), right[0].detach(), rtol=1e-4, atol=1e-5)
        if need_weights:
            torch.testing.assert_close(
                got[1].detach().cpu(), right[1].detach(), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_without_gradients(norm_first):
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=True, norm_first=norm_first
    ).eval()
    on_device = (
        torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
        .to("xla")
        .eval()
    )
    on_device.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(on_device(x.to("xla")).cpu(), layer(x), rtol=1e-4, atol=1e-5)
        mask = F.pad(torch.zeros(5, 4), (0, 1), value=-torch.inf)
        torch.testing.assert_close(
            on_device(x.to("xla"), src_mask=mask.to("xla")).cpu(),
            layer(x, src_mask=mask),
            rtol=1e-4,
            atol=1e-5,
        )
