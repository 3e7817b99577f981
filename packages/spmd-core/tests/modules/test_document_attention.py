"""Attention within documents: values and gradients against the explicit mask, memory, errors."""

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.errors import SpmdError
from spmd_core.ops.kernels import flash


def operands(rows, heads=4, kv_heads=4, batch=2, dtype=torch.float32):
    """Query, key and value, and document ids with padding at the end and in no order."""
    torch.manual_seed(0)
    shapes = [(batch, heads, rows, 8), (batch, kv_heads, rows, 8), (batch, kv_heads, rows, 8)]
    cuts = torch.rand(batch, rows) < 4 / rows
    ids = (cuts.cumsum(1) * 5 % 7).to(torch.int32)
    ids[:, rows - 3 :] = -1
    return [torch.randn(shape, dtype=dtype) for shape in shapes], ids


def explicit(query, key, value, ids, *, is_causal=True, **options):
    """Eager torch, with a mask of rows x rows."""
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    if is_causal:
        mask &= torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, mask, **options)


def results(attend, leaves, ids, **options):
    """The result, and the gradients of query, key and value, on the host."""
    out = attend(*leaves, ids, enable_gqa=True, **options)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)
    (out * weights).sum().backward()
    return [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


def check(tensors, ids, mesh, spec, *, rtol=1e-4, atol=2e-5, **options):
    right = results(explicit, [t.clone().requires_grad_() for t in tensors], ids, **options)
    leaves = [spmd.mark_sharding(t.to("xla"), mesh, spec).requires_grad_() for t in tensors]
    ids = spmd.mark_sharding(ids.to("xla"), mesh, (spec[0], None))
    found = results(spmd.document_attention, leaves, ids, **options)
    for got, correct in zip(found, right):
        torch.testing.assert_close(got, correct, rtol=rtol, atol=atol)


@pytest.fixture(params=[8, 512], ids=["blocks of 8", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", request.param)


@pytest.fixture
def mesh(num_devices):
    shape = (max(1, num_devices // 2), min(2, num_devices))
    return spmd.Mesh(range(num_devices), shape, ("data", "tensor"))


@pytest.mark.one_device
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_values_and_gradients_are_those_of_the_mask(block, is_causal, kv_heads, mesh):
    # Other sizes for each size of blocks: what compiled for one would be taken for the other.
    rows = 20 + is_causal + 2 * (flash.MAX_BLOCK == 8)
    tensors, ids = operands(rows, kv_heads=kv_heads, batch=4)
    check(tensors, ids, mesh, ("data", "tensor", None, None), is_causal=is_causal)


def test_a_batch_that_does_not_divide(mesh):
    tensors, ids = operands(24, batch=3)
    check(tensors, ids, mesh, ("data", None, None, None))


@pytest.mark.parametrize(("is_causal", "rows"), crossed([False, True], [29, 32]))
def test_split_sequences(is_causal, rows, num_devices):
    mesh = spmd.Mesh(range(num_devices), (1, num_devices), ("data", "context"))
    tensors, ids = operands(rows)
    with spmd.context_parallel(mesh):
        check(tensors, ids, mesh, ("data", None, "context", None), is_causal=is_causal)


def test_split_sequences_of_a_batch_that_does_not_divide(mesh):
    tensors, ids = operands(20, batch=3)
    with spmd.context_parallel(mesh, "tensor"):
        check(tensors, ids, mesh, ("data", None, "tensor", None))


def test_sixteen_bits_under_autocast(mesh):
    tensors, ids = operands(24)
    with torch.autocast("xla", dtype=torch.bfloat16):
        found = spmd.document_attention(*(t.to("xla") for t in tensors), ids.to("xla"))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.cpu().float(), explicit(*tensors, ids), rtol=6e-2, atol=6e-2)


def test_a_checkpoint_and_a_second_derivative():
    tensors, ids = operands(12)
    leaves = [t.double().to("xla").requires_grad_() for t in tensors]
    hosts = [t.double().requires_grad_() for t in tensors]

    def penalty(attend, given, ids):
        out = checkpoint(attend, *given, ids, use_reentrant=False)
        grads = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        total = sum(g.square().sum() for g in grads)
        return [total, *torch.autograd.grad(total, given)]

    with sdpa_kernel(SDPBackend.MATH):
        right = penalty(explicit, hosts, ids)
    found = penalty(spmd.document_attention, leaves, ids.to("xla"))
    for got, correct in zip(found, right):
        torch.testing.assert_close(got.cpu(), correct.detach(), rtol=1e-7, atol=1e-8)


def test_other_devices_and_backends_get_the_mask():
    tensors, ids = operands(12)
    right = explicit(*tensors, ids)
    torch.testing.assert_close(spmd.document_attention(*tensors, ids), right)
    with sdpa_kernel(SDPBackend.MATH):
        found = spmd.document_attention(*(t.to("xla") for t in tensors), ids.to("xla"))
    torch.testing.assert_close(found.cpu(), right, rtol=1e-4, atol=2e-5)


def test_dropout_keeps_the_documents_apart():
    (query, key, _), ids = operands(16)
    value = torch.zeros(2, 4, 16, 16)
    value[:] = torch.eye(16)  # the result is the weights
    found = spmd.document_attention(
        *(t.to("xla") for t in (query, key, value)), ids.to("xla"), dropout_p=0.5
    ).cpu()
    weights = explicit(query, key, value, ids)
    assert (found[weights == 0] == 0).all()
    kept = found != 0
    torch.testing.assert_close(found[kept], 2 * weights[kept], rtol=1e-4, atol=1e-5)
    assert 0.3 < kept.sum() / (weights != 0).sum() < 0.7


def temp_bytes(rows, attend):
    """The temporary bytes of a forward and backward of one sequence, on a device."""
    tensors, ids = operands(rows, heads=2, kv_heads=2, batch=1)
    leaves, ids = [t.to("xla").requires_grad_() for t in tensors], ids.to("xla")
    spmd.sync()
    grads = torch.autograd.grad(attend(*leaves, ids).square().sum(), leaves)
    spmd.sync()
    del grads
    return spmd.metrics.programs()[-1].temp_bytes


def test_no_array_of_all_rows_and_keys_exists(monkeypatch):
    monkeypatch.setattr(flash, "MAX_BLOCK", 64)
    small, large = (temp_bytes(rows, spmd.document_attention) for rows in (512, 2048))
    assert large < 6 * small  # four times the rows, sixteen times the scores
    assert large < 2048 * 2048  # the bytes of the mask alone
    assert temp_bytes(512, explicit_on_device) > 512 * 512


def explicit_on_device(query, key, value, ids):
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    return F.scaled_dot_product_attention(query, key, value, mask)


# ---- Errors --------------------------------------------------------------------------------------


def test_ids_that_are_no_integers():
    tensors, ids = operands(8)
    with pytest.raises(SpmdError, match=r"document_ids are integers; got torch.float32\."):
        spmd.document_attention(*tensors, ids.float())
    spmd.document_attention(*tensors, ids.float().to(torch.int32))


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_ids_of_another_shape(device):
    tensors, ids = operands(8)
    query, key, value = (t.to(device) for t in tensors)
    with pytest.raises(SpmdError, match=r"document_ids of \(batch, rows\); got query \(2, 4, 8, 8"):
        spmd.document_attention(query, key, value, ids[:, :4].to(device))
    with pytest.raises(SpmdError, match=r"of equally many rows"):
        spmd.document_attention(query, key[:, :, :4], value[:, :, :4], ids.to(device))


def test_torchs_function_still_refuses_integers():
    tensors, _ = operands(8)
    query, key, value = (t.to("xla") for t in tensors)
    with pytest.raises(RuntimeError, match="attn_mask"):
        F.scaled_dot_product_attention(
            query, key, value, attn_mask=torch.ones(2, 8, dtype=torch.int32, device="xla")
        )
