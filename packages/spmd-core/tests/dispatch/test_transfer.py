"""Copies between host and device: their memory, their strides, and what inherits a sharding."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd_core as spmd

LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "contiguous": lambda d: torch.arange(12.0, device=d).view(3, 4),
    "transposed": lambda d: torch.arange(12.0, device=d).view(3, 4).t(),
    "channels last": lambda d: (
        torch.arange(120.0, device=d).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda d: torch.arange(3.0, device=d)[:, None].expand(3, 4),
    "sliced": lambda d: torch.arange(24.0, device=d).view(4, 6)[::2, 1:5],
    "permuted slice": lambda d: torch.arange(72.0, device=d).view(4, 6, 3)[::2].permute(1, 2, 0),
    "empty": lambda d: torch.empty(0, 3, device=d),
}
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to the host": lambda t: t.to("cpu", copy=True),
    "to the host in another dtype": lambda t: t.to("cpu", torch.float64),
    "to the host, contiguous": lambda t: t.to(
        "cpu", copy=True, memory_format=torch.contiguous_format
    ),
    "clone": lambda t: t.clone(),
    "in another dtype": lambda t: t.double(),
    "deep": copy.deepcopy,
    "positions": lambda t: (t > 2).nonzero(),
    "positions by argwhere": torch.argwhere,
    "into an empty tensor": lambda t: torch.add(t, 1, out=torch.empty(0, device=t.device)),
    "into a longer tensor": lambda t: torch.add(t, 1, out=torch.empty(200, device=t.device)[:0]),
}


@pytest.mark.filterwarnings("ignore:the shape of the result")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_torchs_strides_and_values(layout: str, how: str) -> None:
    right, got = COPIES[how](LAYOUTS[layout]("cpu")), COPIES[how](LAYOUTS[layout]("xla"))
    assert got.shape == right.shape and got.dtype == right.dtype
    assert got.stride() == right.stride()
    assert torch.equal(got.cpu(), right)


def test_deep_copies_share_a_storage_where_the_tensors_did() -> None:
    """And are a copy: neither writes to the other."""
    results: list[Any] = []
    for device in ("cpu", "xla"):
        base = torch.zeros(3, 4, device=device)
        pair = {"whole": base, "row": base[1], "column": base.t()[2]}
        copied = copy.deepcopy(pair)
        copied["row"].add_(1)
        copied["column"].mul_(5)
        pair["row"].sub_(1)
        results.append([t.tolist() for t in (*pair.values(), *copied.values())])
        assert copied["column"].stride() == pair["column"].stride()
    assert results[0] == results[1]


def test_a_copy_from_the_host_does_not_share_its_memory():
    source = torch.ones(4)
    x = torch.zeros(4, device="xla")
    x.copy_(source)
    y = source.to("xla")
    source.fill_(9)
    assert x.tolist() == y.tolist() == [1.0] * 4


def test_a_copy_to_the_host_does_not_share_its_memory():
    x = torch.ones(4).to("xla")
    x.cpu().fill_(9)
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.empty_like,
        torch.clone,
        lambda x: torch.full_like(x, 3),
        lambda x: x.to(torch.float64),
        lambda x: x.bfloat16(),
    ],
)
def test_results_like_a_marked_tensor_are_sharded_like_it(make, mesh_1d):
    x = spmd.mark_sharding(torch.ones(16, 2).to("xla"), mesh_1d, ("x",))
    assert make(x).sharding is x.sharding
    assert make(torch.ones(16, 2).to("xla")).sharding is None


def test_a_list_of_elements_becomes_a_tensor():
    """`torch.tensor` reads them one after the other, as eager torch does."""
    elements = list(torch.arange(3.0).to("xla") * 2)
    assert torch.equal(torch.tensor(elements), torch.tensor([0.0, 2.0, 4.0]))
    mixed = torch.tensor([[elements[1], 1.5], [True, elements[2]]])
    assert torch.equal(mixed, torch.tensor([[2.0, 1.5], [1.0, 4.0]]))
    on_device = torch.as_tensor(elements, device="xla")
    assert on_device.device.type == "xla" and on_device.tolist() == [0, 2, 4]


@pytest.mark.parametrize("number", [1, 2.5, True, 1 + 2j])
def test_a_number_is_copied_into_a_tensor(number):
    x = torch.zeros(2, dtype=torch.complex64 if isinstance(number, complex) else torch.int32)
    assert torch.equal(x.to("xla").copy_(number).cpu(), x.copy_(number))


SIZES = {
    "empty": lambda d: torch.empty(-3, device=d),
    "ones": lambda d: torch.ones(2, -1, device=d),
    "randn": lambda d: torch.randn((4, -1, 2), device=d),
    "full": lambda d: torch.full((-1,), 2.0, device=d),
    "randint": lambda d: torch.randint(0, 5, (-1,), device=d),
    "randperm": lambda d: torch.randperm(-1, device=d),
    "channels_last": lambda d: torch.empty(
        -1, 2, 2, 2, device=d, memory_format=torch.channels_last
    ),
    "too many": lambda d: torch.ones(2**62, 4, device=d),
    "strided": lambda d: torch.empty_strided((-3,), (2,), device=d),
    "stride": lambda d: torch.empty_strided((3,), (-1,), device=d),
    "new_empty": lambda d: torch.ones(2, device=d).new_empty(-1),
    "linear": lambda d: torch.nn.Linear(-3, 2, device=d),
    "embedding": lambda d: torch.nn.Embedding(-3, 2, device=d),
}


@pytest.mark.parametrize("make", SIZES.values(), ids=SIZES)
def test_sizes_that_no_tensor_has_raise_what_torch_raises(make):
    with pytest.raises(RuntimeError) as expected:
        make("cpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            make("xla")


def test_dtypes_that_torch_only_stores_are_refused_by_name():
    """Of a host tensor that is written or meets an operation; what torch can convert is copied."""
    stored = {name: torch.empty(3, dtype=getattr(torch, name)) for name in ("int4", "uint1")}
    for name, host in stored.items():
        whole, part = torch.ones(3, device="xla"), torch.ones(2, 3, device="xla")
        for call in (
            lambda t=whole, h=host: t.copy_(h),
            lambda t=part, h=host: t[1].copy_(h),
            lambda t=part, h=host: t.__setitem__((0, 0), h[0]),
        ):
            with pytest.raises(NotImplementedError, match=f"dtypes .*; got torch.{name}. Convert"):
                call()
        assert whole.tolist() == [1.0] * 3 and part.sum().item() == 6.0
    eights = torch.tensor([0.5, 2.0, -1.0]).to(torch.float8_e4m3fnuz)
    assert torch.ones(3, device="xla").copy_(eights).tolist() == [0.5, 2.0, -1.0]
