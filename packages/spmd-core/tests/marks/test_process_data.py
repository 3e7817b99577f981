"""`from_process_local` in one process; `system/test_processes.py` has what needs several."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import spmd_core as spmd
from spmd_core.marks import process_data
from spmd_core.runtime import agreement
from spmd_core.runtime.processes import get_1d_mesh


@pytest.fixture
def spec(num_devices):
    return spmd.ShardingSpec(get_1d_mesh("x"), ("x", None), minibatch=True)


@pytest.mark.one_device
def test_one_process_gives_all_of_the_tensor(spec, num_devices):
    host = torch.arange(6.0 * num_devices).reshape(3 * num_devices, 2)
    got = spmd.from_process_local(host, spec)
    before = spmd.metrics.counter("uploads")
    host.add_(1)  # the tensor has its own data
    assert torch.equal(got.cpu(), host - 1) and spmd.metrics.counter("uploads") == before
    assert (
        got.sharding is not None
        and [s.data.shape for s in got.local_shards] == [(3, 2)] * num_devices
    )
    # All blocks are here, so that the rows need not divide.
    uneven = spmd.from_process_local(torch.arange(10.0).reshape(5, 2).t().contiguous().t(), spec)
    assert torch.equal(uneven.cpu(), torch.arange(10.0).reshape(5, 2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_dtypes_stay(spec, dtype):
    host = torch.arange(16).reshape(8, 2).to(dtype)
    got = spmd.from_process_local(host, spec)
    assert got.dtype is dtype and torch.equal(got.cpu(), host)
    if dtype.is_complex:
        assert torch.equal(spmd.from_process_local(host.conj(), spec).cpu(), host.conj())


def test_a_part_is_data_on_the_host(spec):
    with pytest.raises(
        spmd.errors.DeviceMismatchError, match=r"got a tensor on xla:0. Pass the CPU"
    ):
        spmd.from_process_local(torch.ones(8, 2, device="xla"), spec)
    with pytest.raises(
        spmd.errors.DataError, match=r"got a tensor that requires grad. Pass t.detach"
    ):
        spmd.from_process_local(torch.ones(8, 2, requires_grad=True), spec)
    with pytest.raises(spmd.errors.PartitionSpecError, match=r"2 entries for a tensor of rank 1"):
        spmd.from_process_local(torch.ones(8), spec)


class Compared(agreement.Series):
    """A series whose comparisons give what `others` makes of this process's text."""

    asked: ClassVar[list[str]] = []

    @staticmethod
    def others(text):
        return {}

    def disagreement(self, *, is_wanted):
        assert self._topic in ("data of a loop", "another") and is_wanted()
        text = self.text(self.count)
        self.asked.append(text)
        return self.others(text)


@pytest.fixture
def compared(monkeypatch):
    monkeypatch.setattr(process_data.devices, "num_processes", lambda: 3)
    monkeypatch.setattr(agreement, "Series", Compared)
    monkeypatch.setattr(Compared, "asked", [])
    return Compared


def test_different_data_is_named_by_process(spec, compared, monkeypatch):
    stream = process_data.Stream("data of a loop")
    data = [("a", torch.ones(8), one_dim(spec)), ("b", torch.ones(8, 2), spec)]
    process_data.check_alike(data[:1], stream)

    def different(text):
        return {0: text, 1: text.replace("float32[8, 2]", "float32[8, 3]"), 2: text}

    monkeypatch.setattr(compared, "others", staticmethod(different))
    with pytest.raises(
        spmd.errors.DataError,
        match=r"must be equal; at number 2 of the data of a loop, got from process 0, 2: "
        r"b float32\[8, 2\] as \('x', None\); from process 1: b "
        r"float32\[8, 3\] as .* Give each process equally many rows",
    ):
        process_data.check_alike(data, stream)
    assert len(compared.asked) == 2
    # Data on which they have agreed is not compared again.
    monkeypatch.setattr(compared, "others", staticmethod(lambda text: {}))
    process_data.check_alike(data, stream)
    process_data.check_alike(data, stream)
    assert len(compared.asked) == 3
    process_data.check_alike(data, process_data.Stream("another"))
    assert len(compared.asked) == 4


def test_the_end_of_the_data_is_compared(spec, compared, monkeypatch):
    stream = process_data.Stream("data of a loop")
    stream.end()
    assert not compared.asked  # with nobody: no process has given a part
    process_data.check_alike([("a", torch.ones(8), one_dim(spec))], stream)
    stream.end()
    assert len(compared.asked) == 2
    monkeypatch.setattr(compared, "others", staticmethod(lambda text: {0: text, 1: "a bool[8]"}))
    stream = process_data.Stream("data of a loop")
    with pytest.raises(
        spmd.errors.DataError,
        match=r"and ends where the others end; at number 1 of the data of a loop, got from process "
        r"0: the end; from process 1: a bool\[8\]\. Give each process equally many batches",
    ):
        stream.compare(["the end"], (0, 1))
    stream.abandon()
    assert next(iter(stream._series.values())).text(2) == "none, as it has left the loop"


def one_dim(spec):
    return spmd.ShardingSpec(spec.mesh, ("x",), minibatch=True)


def test_a_batch_lies_in_the_same_processes(spec, monkeypatch):
    parts = iter([(0,), (0, 1)])
    real = process_data._part

    def part(t, spec):
        found, sharding = real(t, spec)
        return dataclasses.replace(found, processes=next(parts)), sharding

    monkeypatch.setattr(process_data, "_part", part)
    monkeypatch.setattr(process_data.devices, "num_processes", lambda: 2)
    with pytest.raises(
        spmd.errors.DataError, match=r"got meshes over \(0,\) and \(0, 1\). Use one mesh for them"
    ):
        process_data.check_alike([("a", torch.ones(8, 2), spec), ("b", torch.ones(8, 2), spec)])
