"""Weights to safetensors files: what the package safetensors reads; failures keep earlier files."""

import json
import os
import re
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from fsdp_models import Tied
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_core.steps import weight_saving

DTYPES = list(weight_saving.DTYPE_NAMES)


@pytest.mark.one_device
def test_every_dtype_and_shape_on_device_and_host(tmp_path, mesh_2d):
    shapes = [(5, 3), (), (0, 2), (7,)]
    right = {
        f"{i}.{dtype}": torch.arange(15).reshape(5, 3).sum(0).sum().expand(shape).to(dtype).clone()
        for i, shape in enumerate(shapes)
        for dtype in DTYPES
    }
    right["strided"] = torch.arange(6.0).reshape(2, 3).T
    given = {name: t.to("xla") if i % 2 else t for i, (name, t) in enumerate(right.items())}
    for tensor in given.values():
        if isinstance(tensor, spmd.XLAShardedTensor) and tensor.dim():
            spmd.mark_sharding(tensor, mesh_2d, (("a", "b"),))
    spmd.save_safetensors(given, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8),
                           tensor.contiguous().reshape(-1).view(torch.uint8)), name  # fmt: skip
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata().items() > {"format": "pt"}.items()


def test_parts_and_their_index(tmp_path, mesh_1d):
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to("xla")
    spmd.mark_sharding(net[1].weight, mesh_1d, ("x",))
    spmd.save_safetensors(net, tmp_path, max_shard_bytes=300, metadata={"by": "a test"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [*parts, "model.safetensors.index.json"]
    assert index["metadata"] == {"total_size": 3 * (64 + 8) * 4}
    for name, tensor in net.state_dict().items():
        part = load_file(tmp_path / index["weight_map"][name])
        assert torch.equal(part[name], tensor.cpu())
    with safe_open(tmp_path / parts[0], "pt") as file:
        assert file.metadata().items() > {"by": "a test"}.items()
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    spmd.load_safetensors(other, tmp_path)
    assert torch.equal(other[2].weight, net[2].weight.cpu())


def test_a_save_replaces_what_an_earlier_one_wrote(tmp_path):
    """Otherwise a reader would take the old file, or parts of both."""
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    for options in ({}, {"max_shard_bytes": 40}, {"max_shard_bytes": 200}, {}):
        one, two = two, one
        spmd.save_safetensors(one, tmp_path, **options)
        read = nn.Linear(8, 8)
        spmd.load_safetensors(read, tmp_path)
        assert torch.equal(read.weight, one.weight)
        assert len(os.listdir(tmp_path)) == (3 if options else 1)


def test_a_tied_weight_is_written_once(tmp_path):
    right = Tied()
    for net in (right, Tied().to("xla")):
        spmd.save_safetensors(net, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        tied = [name for name in net.state_dict() if name not in found]
        assert len(tied) == 1 and "embedding.weight" in found
        assert spmd.load_safetensors(right, tmp_path) == ([], [])


@contextmanager
def full_disk(num_bytes):
    """No file may become larger than this within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [100, 500], ids=["the first part", "a later part"])
def test_a_full_disk_keeps_the_earlier_save(tmp_path, room):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))
    spmd.save_safetensors(net, tmp_path, max_shard_bytes=300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        net[0].weight.zero_()
    with full_disk(room), pytest.raises(OSError, match="weights must fit on the disk") as error:
        spmd.save_safetensors(net, tmp_path, max_shard_bytes=300)
    assert "File too large" in str(error.value) and "An earlier save" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=re.escape(f"{tmp_path / 'file'} could not be written")):
        spmd.save_safetensors(nn.Linear(2, 2), tmp_path / "file")


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"got 'step' \(int\)\. Leave these out"):
        spmd.save_safetensors({"step": 3}, tmp_path)
    with pytest.raises(DataError, match=r"got 'z' \(torch\.complex128\)\. Convert"):
        spmd.save_safetensors({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(ValueError, match="got max_shard_bytes=0"):
        spmd.save_safetensors({}, tmp_path, max_shard_bytes=0)
    assert os.listdir(tmp_path) == []
    spmd.save_safetensors({}, tmp_path)
    assert load_file(tmp_path / "model.safetensors") == {}
