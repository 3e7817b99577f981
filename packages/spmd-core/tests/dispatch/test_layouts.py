"""Sparse, nested, quantized and mkldnn tensors are refused, and nothing runs before."""

import warnings

import pytest
import torch
from torch.nn import functional as F

import spmd_core as spmd

# torch's own warnings about these tensors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

INDEX, VALUE = torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0])
ROWS, COLUMNS = torch.tensor([0, 1, 2]), torch.tensor([0, 1])


def on_device(*shape):
    return torch.ones(*shape, device="xla")


SPARSE = {
    "to": lambda: torch.eye(3).to_sparse().to("xla"),
    "to csr": lambda: torch.eye(3).to_sparse_csr().to("xla"),
    "to bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)).to("xla"),
    "of indices": lambda: torch.sparse_coo_tensor(INDEX, VALUE, (3,), device="xla"),
    "of tensors": lambda: torch.sparse_coo_tensor(INDEX.to("xla"), VALUE.to("xla"), (3,)),
    "without size": lambda: torch.sparse_coo_tensor(INDEX, VALUE, device="xla"),
    "csr": lambda: torch.sparse_csr_tensor(ROWS, COLUMNS, VALUE, (2, 2), device="xla"),
    "csc": lambda: torch.sparse_csc_tensor(ROWS, COLUMNS, VALUE, (2, 2), device="xla"),
    "to_sparse": lambda: on_device(3).to_sparse(),
    "to_sparse dims": lambda: on_device(3, 3).to_sparse(1),
    "to_sparse_csr": lambda: on_device(3, 3).to_sparse_csr(),
    "to_sparse_csc": lambda: on_device(3, 3).to_sparse_csc(),
    "to_sparse_bsr": lambda: on_device(4, 4).to_sparse_bsr((2, 2)),
    "zeros": lambda: torch.zeros(2, 2, layout=torch.sparse_csr, device="xla"),
    "like": lambda: torch.zeros_like(on_device(3), layout=torch.sparse_coo),
    "mask": lambda: on_device(3, 3).sparse_mask(torch.eye(3).to_sparse()),
    "copy_": lambda: on_device(3, 3).copy_(torch.eye(3).to_sparse()),
    "zeros, of indices": lambda: torch.zeros(2, layout=torch.sparse_coo, device="xla"),
    "empty csr": lambda: torch.empty(2, 2, layout=torch.sparse_csr, device="xla"),
    "add": lambda: on_device(3, 3) + torch.eye(3).to_sparse(),
    "embedding": lambda: (
        F.embedding(INDEX.to("xla"), on_device(3, 2).requires_grad_(), sparse=True).sum().backward()
    ),
    "bag": lambda: (
        F.embedding_bag(INDEX.to("xla"), on_device(3, 2).requires_grad_(), sparse=True, mode="sum")
        .sum()
        .backward()
    ),
}
PARTS = [torch.ones(2, 3), torch.ones(1, 3)]
NESTED = {
    "strided": lambda: torch.nested.nested_tensor(PARTS, device="xla"),
    "jagged": lambda: torch.nested.nested_tensor(PARTS, device="xla", layout=torch.jagged),
    "of tensors": lambda: torch.nested.nested_tensor([on_device(2, 3), on_device(1, 3)]),
    "of tensors, jagged": lambda: torch.nested.nested_tensor(
        [on_device(2, 3), on_device(1, 3)], layout=torch.jagged
    ),
    "as": lambda: torch.nested.as_nested_tensor([on_device(2, 3), on_device(1, 3)]),
    "as, jagged": lambda: torch.nested.as_nested_tensor(
        [on_device(2, 3), on_device(1, 3)], layout=torch.jagged
    ),
    "of rows": lambda: torch.nested.as_nested_tensor(on_device(2, 3)),
    "of values": lambda: torch.nested.nested_tensor_from_jagged(on_device(2, 3), ROWS.to("xla")),
    "to": lambda: torch.nested.nested_tensor(PARTS).to("xla"),
    "ones": lambda: torch.ones(2, 3, layout=torch.jagged, device="xla"),
    "empty_strided": lambda: torch.empty_strided((2,), (1,), layout=torch.jagged, device="xla"),
    "add": lambda: on_device(2, 3) + torch.nested.nested_tensor(PARTS),
    "add, jagged": lambda: on_device(3) + torch.nested.nested_tensor(PARTS, layout=torch.jagged),
    "to, jagged": lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged).to("xla"),
}
QUANTIZED = {
    "tensor": lambda: torch.quantize_per_tensor(on_device(3), 0.1, 0, torch.qint8),
    "channel": lambda: torch.quantize_per_channel(
        on_device(3, 2), on_device(3), on_device(3), 0, torch.qint8
    ),
    "dynamic": lambda: torch.quantize_per_tensor_dynamic(on_device(3), torch.qint8, False),
    "zeros": lambda: torch.zeros(3, dtype=torch.qint8, device="xla"),
    "like": lambda: torch.zeros_like(on_device(3), dtype=torch.quint8),
    "cast": lambda: on_device(3).to(torch.qint8),
    "copy_": lambda: on_device(3).copy_(torch.ones(3, dtype=torch.uint8).view(torch.qint8)),
    "add": lambda: on_device(3) + torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}
ADVICE = {
    "sparse": r"Use dense tensors: sparse.to_dense\(\).to\('xla'\), sparse=False for embeddings",
    "nested": r"Pad the sequences to one length: torch.nn.utils.rnn.pad_sequence",
    "quantized": r"Use integers with a scale of your own, .* or torch.fake_quantize_per_tensor",
    "mkldnn": r"Leave out to_mkldnn\(\)",
}
CASES = {
    **{f"sparse {n}": ("sparse", case) for n, case in SPARSE.items()},
    **{f"nested {n}": ("nested", case) for n, case in NESTED.items()},
    **{f"quantized {n}": ("quantized", case) for n, case in QUANTIZED.items()},
    "mkldnn": ("mkldnn", lambda: on_device(3).to_mkldnn()),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_anything_runs(name):
    kind, make = CASES[name]
    counters = ("cuts", "uploads", "compiles", "host_reads")
    before = [spmd.metrics.counter(c) for c in counters]
    message = rf"are dense; got .*, which makes a {kind} tensor there\. {ADVICE[kind]}"
    with pytest.raises(spmd.errors.UnsupportedOpError, match=message):
        make()
    assert not spmd.metrics.host_fallbacks()
    if name != "sparse without size":  # which torch reads from the indices first
        assert [spmd.metrics.counter(c) for c in counters] == before


def test_the_advice():
    eye = torch.eye(3).to_sparse()
    assert eye.to_dense().to("xla").tolist() == torch.eye(3).tolist()
    weight = on_device(3, 2).requires_grad_()
    F.embedding(INDEX.to("xla"), weight, sparse=False).sum().backward()
    assert weight.grad.tolist() == [[1.0, 1], [1, 1], [0, 0]]
    padded = torch.nn.utils.rnn.pad_sequence(PARTS, batch_first=True).to("xla")
    assert padded.sum().item() == 9
    x, scale = torch.tensor([0.31, -0.52]).to("xla"), 0.1
    assert ((x / scale).round().to(torch.int8) * scale).tolist() == pytest.approx([0.3, -0.5])
    faked = torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)
    assert faked.tolist() == pytest.approx([0.3, -0.5])
    quantized = torch.quantize_per_tensor(x.cpu(), scale, 0, torch.qint8)
    assert quantized.dequantize().to("xla").tolist() == pytest.approx([0.3, -0.5])


def test_tensors_of_the_host_are_torchs_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        parts = [torch.ones(2, 3, requires_grad=True), torch.ones(1, 3)]
        nested = torch.nested.as_nested_tensor(parts).to(torch.float64)
        assert nested.is_nested and nested.dtype is torch.float64
        torch.nested.to_padded_tensor(nested, 0.0).sum().backward()
    assert parts[0].grad.tolist() == [[1.0] * 3] * 2
    made = torch.nested.nested_tensor(PARTS, dtype=torch.float64, device="cpu")
    assert [t.tolist() for t in made.unbind()] == [p.tolist() for p in PARTS]
    assert torch.eye(3).to_sparse().to(torch.float64).to_dense().dtype is torch.float64


OTHER_DTYPES = ("int4", "uint1", "uint7", "bits8", "float4_e2m1fn_x2", "float8_e8m0fnu", "qint8")


@pytest.mark.parametrize("name", [n for n in OTHER_DTYPES if hasattr(torch, n)])
def test_dtypes_that_the_device_lacks_are_refused(name):
    dtype, x = getattr(torch, name), torch.zeros(4, dtype=torch.uint8, device="xla")
    for make in (
        lambda: x.view(dtype),
        lambda: x[1:].view(dtype),
        lambda: x.to(dtype),
        lambda: torch.zeros_like(x, dtype=dtype),
        lambda: torch.zeros(4, dtype=dtype, device="xla"),
    ):
        message = rf"'xla' .*; got .*torch\.{name}.* (Convert it first with|Use integers)"
        with pytest.raises((TypeError, NotImplementedError), match=message):
            make()
    # As the message advises.
    assert x.to(torch.float8_e5m2).float().tolist() == x.view(torch.int8).tolist() == [0] * 4


def test_other_devices_without_a_kernel_keep_an_error_of_their_own():
    with pytest.raises(NotImplementedError, match=r"aten::empty.memory_format' .* device mps"):
        torch.empty(3, device="mps")
