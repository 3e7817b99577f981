"""Storages and views: versions, chains, and what is held when a value is computed."""

import torch

import spmd_core as spmd


def test_a_view_that_was_read_sees_later_writes():
    x = torch.zeros(4, device="xla")
    view = x[1:3]
    # By an operation, as a read on the host would make a view of the view.
    assert (view + 0).tolist() == [0, 0]
    x.fill_(1)
    assert (view + 0).tolist() == [1, 1]
    spmd.sync()
    x.copy_(torch.arange(4.0))
    assert (view + 0).tolist() == [1, 2]


def test_host_data_that_replaces_a_value_reaches_views():
    x = torch.zeros(4, device="xla")
    storage, view = x._handle, x[1:3]
    assert view.tolist() == [0, 0]
    before = storage.version
    storage.write(torch.arange(4.0).to("xla")._handle.value)
    assert storage.version == before + 1 and view.tolist() == [1, 2]


def test_a_computed_value_is_the_committed_one():
    x = torch.ones(3, device="xla") + 1
    spmd.sync()
    storage = x._handle
    assert storage.committed is storage.value and storage.value.data is not None
    first = storage.value
    x.add_(1)
    assert storage.committed is first
    spmd.sync()
    assert storage.committed is storage.value is not first


def test_a_view_in_another_dtype_of_a_view_begins_where_torchs_does():
    cpu = torch.arange(16, dtype=torch.int64)
    for offset in (1, 3):
        expected = cpu[offset:].view(torch.int32)[2:]
        got = cpu.to("xla")[offset:].view(torch.int32)[2:]
        assert got.storage_offset() == expected.storage_offset()
        assert got.tolist() == expected.tolist()
    expected = cpu.view(torch.int32)[4:].view(torch.int64)
    got = cpu.to("xla").view(torch.int32)[4:].view(torch.int64)
    assert got.storage_offset() == expected.storage_offset() and got.tolist() == expected.tolist()


def test_a_computed_value_holds_nothing_that_it_was_computed_from():
    y = torch.ones(3, device="xla") * 2 + 1
    assert y._handle.value.inputs and y._handle.value.entry.name == "aten::add.Tensor"
    spmd.sync()
    assert y._handle.value.inputs == () and y._handle.value.entry is None
    assert y.tolist() == [3, 3, 3]
