"""Writes of one value through views whose elements share memory, as in eager torch."""

import pytest
import torch

import spmd_core as spmd

WRITES = {
    "fill": lambda v: v.fill_(2.0),
    "zero": lambda v: v.zero_(),
    "negative zero": lambda v: v.fill_(-0.0),
    "nan": lambda v: v.masked_fill_(torch.eye(3, 4, device=v.device) > 0, float("nan")),
    "mask": lambda v: v.__setitem__(torch.eye(3, 4, device=v.device) > 0, 7.0),
    "masked_fill": lambda v: v.masked_fill_(
        torch.eye(3, 4, device=v.device) > 0, torch.tensor(7.0, device=v.device)
    ),
    "index_put": lambda v: v.__setitem__(torch.tensor([1], device=v.device), 7.0),
    "index_fill": lambda v: v.index_fill_(0, torch.tensor([1], device=v.device), 5.0),
}
VIEWS = {
    "expanded": lambda x: x[:, :1].expand(3, 4),
    "expanded column of a transpose": lambda x: x.t()[1, :, None].expand(3, 4),
    "windows": lambda x: x.view(-1).unfold(0, 4, 2)[:3],
}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_one_value_may_be_written_to_shared_memory(write: str, view: str) -> None:
    got = []
    for device in ("cpu", "xla"):
        x = torch.tensor([[1.0, 2, float("nan")], [-3, 0, 5], [6, -0.0, 8]], device=device)
        whole = x * 1
        part = VIEWS[view](whole)
        WRITES[write](part)
        got.append((whole.cpu(), part.cpu()))
    for mine, right in zip(got[1], got[0]):
        torch.testing.assert_close(mine, right, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine.signbit() & ~mine.isnan(), right.signbit() & ~right.isnan())


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
def test_the_written_tensor_may_be_split(mesh_1d: spmd.Mesh, num_devices: int) -> None:
    x = spmd.mark_sharding(torch.arange(2.0 * num_devices).to("xla"), mesh_1d, ("x",))
    wide = x[:, None].expand(-1, 3)
    wide[wide > 4] = -1.0
    assert x.tolist() == [v if v <= 4 else -1.0 for v in range(2 * num_devices)]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.bool, torch.int8])
def test_other_dtypes(dtype: torch.dtype) -> None:
    got = []
    for device in ("cpu", "xla"):
        x = torch.tensor([1, 0, 2]).to(dtype).to(device)
        x[:, None].expand(3, 2).fill_(1)
        got.append(x.cpu())
    assert torch.equal(*got)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
def test_several_values_are_refused() -> None:
    wide = torch.zeros(3, device="xla")[:, None].expand(3, 2)
    with pytest.raises(RuntimeError, match="single memory location"):
        wide.add_(torch.ones(3, 2, device="xla"))
    with pytest.raises(RuntimeError, match=r"every element at its own place.*clone\(\) the tensor"):
        wide[torch.tensor([0], device="xla")] = torch.ones(2, device="xla")
