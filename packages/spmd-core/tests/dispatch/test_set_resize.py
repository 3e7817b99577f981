"""`set_`, `resize_` and the identity of storages, against eager torch."""

import pytest
import torch

import spmd_core as spmd


def shows(x):
    return x.tolist(), x.stride(), x.storage_offset()


RESIZES = {
    "the same elements": lambda x, alias: x.resize_(2, 3),
    "fewer": lambda x, alias: x.resize_(2, 2),
    "to nothing": lambda x, alias: x.resize_(0),
    "a view": lambda x, alias: alias.resize_(2, 2),
    "a view back to the whole": lambda x, alias: x[:2].resize_(6),
    "channels last": lambda x, alias: x.resize_(1, 2, 1, 3, memory_format=torch.channels_last),
    "the same shape": lambda x, alias: x.resize_(6),
}


@pytest.mark.parametrize("name", RESIZES)
def test_resize_within_the_storage_keeps_the_memory(name):
    results = []
    for device in ("cpu", "xla"):
        x = torch.arange(6.0).to(device)
        alias = x[2:]
        y = RESIZES[name](x, alias)
        y.add_(10)
        results.append([shows(x), shows(alias), shows(y)])
    assert results[1] == results[0]


def test_resize_lengthens_memory_that_is_not_shared():
    x = torch.ones(2, device="xla")
    assert x.resize_(3, 2)[:1].tolist() == [[1, 1]] and x.shape == (3, 2)
    x.resize_(0).resize_(2, 2).fill_(3)
    assert x.resize_(8)[:4].tolist() == [3] * 4
    assert torch.empty(0, device="xla").resize_(2, 3).fill_(1).sum().item() == 6
    alias = x[1:]
    with pytest.raises(
        spmd.errors.UnsupportedOpError,
        match=r"no other tensor shares.*needs 9 elements where there are 8.*torch\.empty\(\(9,\)",
    ):
        x.resize_(9)
    with pytest.raises(spmd.errors.UnsupportedOpError, match="no other tensor shares"):
        alias.resize_(9)
    detached = torch.ones(2, device="xla")
    other = detached.detach()
    with pytest.raises(spmd.errors.UnsupportedOpError, match="no other tensor shares"):
        detached.resize_(9)
    del other
    assert detached.resize_(9).shape == (9,)
    with pytest.raises(RuntimeError, match="at least 0; got"):
        x.resize_(-1)


def test_set_shares_the_other_tensors_memory():
    x, y = torch.zeros(3, device="xla"), torch.arange(6.0, device="xla").view(2, 3)
    x.set_(y.t())
    x.add_(1)
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]] and x.is_set_to(y.t()) and not x.is_set_to(y)
    assert x.set_().shape == (0,)
    with pytest.raises(RuntimeError, match="set tensor of type"):
        x.set_(torch.zeros(2, dtype=torch.int64, device="xla"))
    with pytest.raises(
        spmd.errors.DeviceMismatchError, match=r"two tensors on one device.*\.to\('xla'\)"
    ):
        x.set_(torch.zeros(2))
    with pytest.raises(
        spmd.errors.UnsupportedOpError, match=r"set_ to a storage object.*other_tensor"
    ):
        x.set_(torch.zeros(2).untyped_storage(), 0, (2,), (1,))


def test_strides_with_gaps_or_shared_places():
    x = torch.empty_strided((2, 3), (10, 2), device="xla").fill_(2)
    assert x.stride() == (10, 2) and x.as_strided((15,), (1,)).tolist() == [
        2,
        0,
        2,
        0,
        2,
        0,
        0,
        0,
        0,
        0,
        2,
        0,
        2,
        0,
        2,
    ]
    assert torch.empty_strided((2, 3), (0, 1), device="xla").fill_(2).tolist() == [[2] * 3] * 2
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.empty_strided((2, 3), (0, 1), device="xla").add_(2)


def test_storages_are_told_apart_as_by_address():
    x, y = torch.zeros(3, 2, device="xla"), torch.zeros(3, 2, device="xla")
    assert (
        x.data_ptr()
        == x.detach().data_ptr()
        == x.t().data_ptr()
        == x.untyped_storage().data_ptr()
        != y.data_ptr()
    )
    assert (
        x[1].data_ptr() == x.data_ptr() + 8
        and x[1].untyped_storage() == x.untyped_storage() != y.untyped_storage()
    )
    assert (
        x[1].untyped_storage().nbytes()
        == x.untyped_storage().size()
        == len(x.untyped_storage())
        == 24
    )
    assert len({x.untyped_storage(), x[1].untyped_storage(), y.untyped_storage()}) == 2
    layer = torch.nn.Linear(2, 2, bias=False, device="xla")
    tied = torch.nn.Linear(2, 2, bias=False, device="xla")
    tied.weight = layer.weight
    assert tied.weight.data_ptr() == layer.weight.data_ptr()
    with pytest.raises(
        AttributeError, match=r"no bytes that Python can reach; got \.resize_\. Use the tensor"
    ):
        x.untyped_storage().resize_(0)
    with pytest.raises(
        spmd.errors.UnsupportedOpError, match=r"got storage\(\).*untyped_storage\(\)\.data_ptr"
    ):
        x.storage()
    assert x.share_memory_() is x and x.is_shared()


def test_tied_weights_are_saved_once(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(3, 3, bias=False)
            self.b = torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    model = Tied().to("xla")
    assert model.a.weight is model.b.weight
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert len(safetensors.load_file(tmp_path / "model.safetensors")) == 1
