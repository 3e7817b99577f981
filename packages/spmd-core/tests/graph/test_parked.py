"""Parked storages: they have their values back when anything reads, writes or marks them."""

import gc
import weakref

import pytest
import torch

import spmd_core as spmd
from spmd_core.graph import parked
from spmd_core.graph.recorders import lock


def parked_tensor(values=(1.0, 2.0, 3.0)):
    tensor = torch.tensor(values).to("xla") * 1
    spmd.sync()
    storage = tensor._handle
    value = storage.value
    with lock:
        parked.spot_of([storage]).park(value.data, value.placement)
    assert parked.is_parked(storage)
    return tensor


@pytest.mark.parametrize(
    "touch",
    [
        lambda t: t.tolist(),
        lambda t: t + 1,
        lambda t: t.add_(0),
        lambda t: t[0].item(),
        lambda t: t._handle.version,
        lambda t: t._handle.committed,
        lambda t: t.data.mul_(1),
        lambda t: spmd.mark_sharding(t, spmd.Mesh((0,), (1,), ("x",)), (None,)),
    ],
)
def test_what_gives_a_value_back(touch):
    tensor = parked_tensor()
    watcher = parked.Watcher()
    touch(tensor)
    assert not parked.is_parked(tensor._handle.storage) and len(watcher.places) == 1
    assert tensor.tolist() == [1.0, 2.0, 3.0]


def test_what_does_not():
    tensor = parked_tensor()
    assert tensor._handle.storage.sharding is None and tensor.shape == (3,)
    assert tensor.data_ptr() == tensor.detach().data_ptr() and tensor[1:].shape == (2,)
    assert parked.is_parked(tensor._handle)


def test_views_see_what_was_written_meanwhile():
    tensor = torch.arange(3.0).to("xla") * 1
    view = tensor[1:]
    assert view.tolist() == [1.0, 2.0]
    other = torch.full((3,), 5.0).to("xla") * 1
    spmd.sync()
    with lock:
        value = other._handle.value
        parked.spot_of([tensor._handle]).park(value.data, value.placement)
    assert view.tolist() == [5.0, 5.0] and tensor.tolist() == [5.0] * 3


def test_a_spot_is_free_after_its_storage():
    tensor = parked_tensor()
    spot = parked.spot_of([tensor._handle])
    place, gone = spot.place, weakref.ref(parked.arrays[spot.place])
    assert parked.spot_of([tensor._handle]) is spot
    del tensor, spot
    gc.collect()
    assert parked.arrays[place] is None and gone() is None


def test_a_write_of_a_parked_storage_wins():
    tensor = parked_tensor()
    before = tensor._handle.spec
    tensor.copy_(torch.zeros(3))
    assert tensor.tolist() == [0.0] * 3 and tensor._handle.spec is before
