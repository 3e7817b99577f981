"""Attention over split sequences: values and gradients of the whole, memory, what moves, errors."""

import pytest
import torch
import torch.nn.functional as F
from children import figures
from tiers import crossed, exhaustive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.ops.kernels import flash

MASKS = ("none", "causal", "bool", "float")


def operands(rows, keys, heads=4, kv_heads=4, batch=2):
    torch.manual_seed(0)
    shapes = [(batch, heads, rows, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 8)]
    return [torch.randn(shape) for shape in shapes]


def mask_of(kind, rows, keys):
    if kind == "bool":  # one key is hidden from all, and one query attends to nothing
        mask = torch.rand(2, 1, rows, keys) > 0.4
        mask[:, :, :, 3], mask[:, :, 1] = False, False
        return mask
    return torch.randn(rows, keys) if kind == "float" else None


def results(leaves, mask, *, is_causal=False):
    """The result, and the gradients of query, key and value, on the host."""
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask, is_causal=is_causal, enable_gqa=leaves[0].dim() > 2
    )
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)
    (out * weights).sum().backward()
    return [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


def on_device(tensors, mesh, spec):
    return [spmd.mark_sharding(t.to("xla"), mesh, spec).requires_grad_() for t in tensors]


def check(tensors, kind, mesh, axis, spec, atol=2e-5):
    rows, keys = tensors[0].shape[-2], tensors[1].shape[-2]
    mask = mask_of(kind, rows, keys)
    leaves = [t.clone().requires_grad_() for t in tensors]
    right = results(leaves, mask, is_causal=kind == "causal")
    with spmd.context_parallel(mesh, axis):
        found = results(
            on_device(tensors, mesh, spec),
            None if mask is None else mask.to("xla"),
            is_causal=kind == "causal",
        )
    for got, correct in zip(found, right):
        torch.testing.assert_close(got, correct, rtol=1e-4, atol=atol)


@pytest.mark.one_device
@pytest.mark.parametrize(("kind", "rows"), crossed(MASKS, [32, 27]))
def test_one_axis(mesh_1d, kind, rows):
    check(operands(rows, rows), kind, mesh_1d, "x", (None, None, "x"))


LAYOUTS = (
    ("a", ("b", None, "a"), 4, 32),  # the batch
    ("a", (None, "b", "a"), 2, 30),  # the heads
    ("b", (None, "a", "b"), 2, 32),  # more devices than heads of keys
    ("b", (None,), 1, 31),  # nothing is marked, and a part of a group on each device
)


@pytest.mark.parametrize(("kind", "layout"), crossed(("bool", "none", "float", "causal"), LAYOUTS))
def test_another_axis_splits_batch_or_heads(mesh_2d, kind, layout):
    axis, spec, kv_heads, rows = layout
    check(operands(rows, rows, kv_heads=kv_heads), kind, mesh_2d, axis, spec)


@pytest.mark.parametrize("kind", ["none", "bool"])
def test_keys_of_another_length(mesh_1d, kind):
    check(operands(24, 17), kind, mesh_1d, "x", (None,))


def test_more_devices_than_rows(mesh_1d):
    check(operands(5, 5), "causal", mesh_1d, "x", (None,))


def test_many_blocks(mesh_1d, monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", 4)
    check(operands(160, 160, batch=1), "causal", mesh_1d, "x", (None,))


@pytest.mark.parametrize("leading", [(), exhaustive((4,)), (2, 2, 4)])
def test_other_ranks(mesh_1d, leading):
    torch.manual_seed(0)
    tensors = [torch.randn(*leading, 16, 8) for _ in range(3)]
    check(tensors, "causal", mesh_1d, "x", (None,))


def test_a_marked_query_needs_no_context(mesh_1d, num_devices):
    tensors = operands(32, 32)
    leaves = on_device(tensors, mesh_1d, (None, None, "x"))
    found = F.scaled_dot_product_attention(*leaves, is_causal=True)
    if num_devices > 1:
        moved = spmd.debugging.collectives(found)
        assert {c.kind for c in moved} == {"collective-permute"}
    right = F.scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(found.detach().cpu(), right, rtol=1e-4, atol=1e-5)


def test_bfloat16(mesh_1d):
    tensors = [t.bfloat16() for t in operands(32, 32)]
    check(tensors, "causal", mesh_1d, "x", (None,), atol=0.05)


def test_second_derivatives(mesh_1d):
    def penalty(leaves):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        (grad,) = torch.autograd.grad(out.sin().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaves[1])[0].detach().cpu()

    tensors = operands(16, 16)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused kernel is differentiable once
        right = penalty([t.clone().requires_grad_() for t in tensors])
    with spmd.context_parallel(mesh_1d, "x"):
        found = penalty(on_device(tensors, mesh_1d, (None,)))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_runs_again_as_it_ran_before(mesh_1d, num_devices):
    if num_devices == 1:
        pytest.skip("a ring of one device sends nothing")
    sent = []
    for runs in (1, 2):
        leaves = on_device(operands(32, 32), mesh_1d, (None, None, "x"))

        def attend(*leaves):
            return F.scaled_dot_product_attention(*leaves, is_causal=True).sin()

        with spmd.context_parallel(mesh_1d, "x"):
            out = attend(*leaves) if runs == 1 else checkpoint(attend, *leaves, use_reentrant=False)
        out.square().sum().backward()
        moved = spmd.debugging.collectives(*(leaf.grad for leaf in leaves))
        assert {c.kind for c in moved} == {"collective-permute"}
        sent.append(sum(c.moved_bytes for c in moved))
        spmd.sync()
    assert sent[1] > 1.2 * sent[0]


def test_as_a_decorator(mesh_1d):
    leaves = on_device(operands(32, 32), mesh_1d, (None,))
    attend = spmd.context_parallel(mesh_1d, "x")(F.scaled_dot_product_attention)
    found = [attend(*leaves).cpu(), attend(*leaves).cpu()]
    right = F.scaled_dot_product_attention(*operands(32, 32))
    torch.testing.assert_close(found[0], right, rtol=1e-4, atol=1e-5)
    assert torch.equal(*found)


_FIGURES = """
import json
import torch
import torch.nn.functional as F

spmd.simulate(8)
spmd.use_spmd()
found = {}
for name, sizes in (("whole", (8, 1)), ("ring", (1, 8))):
    mesh = spmd.Mesh(range(8), sizes, ("all", "context"))
    with torch.device("xla"):
        leaves = [torch.zeros(1, 2, 16384, 64, requires_grad=True) for _ in range(3)]
    for leaf in leaves:
        spmd.mark_sharding(leaf, mesh, (None, None, "context"))
    spmd.sync()
    with spmd.context_parallel(mesh):
        F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    spmd.debugging.hlo(*(leaf.grad for leaf in leaves))  # compiles it, and runs nothing
    found[name] = spmd.metrics.programs()[-1].peak_bytes
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_device_needs_memory_for_its_part(num_devices):
    if num_devices != 8:
        pytest.skip("the ring is of 8 devices")
    found = figures(_FIGURES)
    # The inputs and results are an eighth; a block of scores takes the same, and copies are added.
    assert found["ring"] < 0.5 * found["whole"]


def test_what_is_refused(mesh_1d, num_devices):
    query, key, value = (t.to("xla") for t in operands(16, 16))
    attend = F.scaled_dot_product_attention
    with spmd.context_parallel(mesh_1d, "x"):
        with pytest.raises(spmd.errors.SpmdError, match=r"has no dropout; got dropout_p=0\.1\."):
            attend(query, key, value, dropout_p=0.1)
        mask = torch.zeros(16, 16, device="xla", requires_grad=True)
        with pytest.raises(spmd.errors.SpmdError, match="no gradient of its mask"):
            attend(query, key, value, attn_mask=mask)
        with pytest.raises(spmd.errors.SpmdError, match="got 8 queries and 16 keys"):
            attend(query[:, :, :8], key, value, is_causal=True)
        region = spmd.shard_map(lambda q: attend(q, q, q), mesh_1d, [()], ())
        with pytest.raises(spmd.errors.SpmdError, match="local to a manual region"):
            region(query)
    with (
        pytest.raises(spmd.errors.PartitionSpecError, match="'y'"),
        spmd.context_parallel(mesh_1d, "y"),
    ):
        pass
