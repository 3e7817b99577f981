"""Loaders, devices, shardings, datasets and arrays are refused if they are none."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import spmd_core as spmd
import spmd_data
from spmd_data import MpDeviceLoader, TokenStream, TransformedSamples, sharded_dataloader

REFUSED = r"; got .*\. (Write|Pass|Sort|Give|Use) "
X = torch.ones(8, 4)
SAMPLES = TensorDataset(X)


@dataclasses.dataclass
class Pair:
    x: object
    y: object


def test_loaders_and_devices():
    for loader in ("abc", b"abc", 5, None, {"train": [X]}, list, spmd_data):
        with pytest.raises(TypeError, match="a loader gives batches" + ".*" + REFUSED):
            MpDeviceLoader(loader, "xla")
    for device in (5.5, None, ["cpu"], True, "zz", "xla:3", torch.device("xla:1")):
        with pytest.raises((TypeError, RuntimeError), match=REFUSED):
            MpDeviceLoader([X], device)
    for device in ("xla", "xla:0", "cpu", torch.device("cpu"), spmd.device()):
        (batch,) = MpDeviceLoader([X], device)
        assert torch.equal(batch.cpu(), X)
    with pytest.raises(TypeError, match="writer has add_scalar.*" + REFUSED):
        MpDeviceLoader([X], "cpu").log(print, 1)


def test_shardings_are_checked_when_the_loader_is_made(mesh):
    spec = spmd.ShardingSpec(mesh, ("data",))
    for sharding, where in (
        ("x", ""),
        (5, ""),
        (("data", None), r"\[0\]"),
        (spmd.PartitionSpec("data"), ""),
        ({"x": spec, "y": "data"}, r"\['y'\]"),
        ({"x": [None, {"z": 5}]}, r"\['x'\]\[1\]\['z'\]"),
        (Pair(spec, "data"), r"\['y'\]"),
        (mesh, ""),
    ):
        with pytest.raises(
            spmd.errors.DataError,
            match=f"must be a ShardingSpec or None; got .* for input_sharding{where}. Pass ",
        ):
            MpDeviceLoader([X], "xla", input_sharding=sharding)
    for sharding in (None, spec, lambda path, x: spec, [spec, None], {}, Pair(spec, None), ()):
        MpDeviceLoader([X], "xla", input_sharding=sharding)


def test_datasets_and_meshes(mesh):
    for call in (
        lambda: sharded_dataloader(64, mesh, "data", batch_size=8),
        lambda: sharded_dataloader("samples" * 8, mesh, "data", batch_size=8),
        lambda: sharded_dataloader(iter(X), mesh, "data", batch_size=8),
        lambda: sharded_dataloader(SAMPLES, 5, "data", batch_size=8),
        lambda: sharded_dataloader(SAMPLES, "data", "data", batch_size=8),
        lambda: sharded_dataloader(SAMPLES, mesh, 5.5, batch_size=8),
        lambda: sharded_dataloader(SAMPLES, mesh, b"data", batch_size=8),
        lambda: sharded_dataloader(SAMPLES, mesh, "data", batch_size=8, collate_fn=5),
        lambda: spmd_data.shard_dataset(SAMPLES, None, "data"),
        lambda: spmd_data.ShardedSampler.of_mesh(8, 5, "data", batch_size=8),
        lambda: TransformedSamples(None, print),
        lambda: TransformedSamples(iter(X), print),
        lambda: TransformedSamples(SAMPLES, None),
        lambda: TransformedSamples(SAMPLES, "flip"),
    ):
        with pytest.raises((TypeError, ValueError), match=REFUSED):
            call()
    for axis in ("data", 0, np.int64(0), ["data"], (0,), None):
        assert len(sharded_dataloader(SAMPLES, mesh, axis, batch_size=8)) == 1


def test_token_streams_are_arrays_of_integers_with_ascending_starts():
    tokens = np.arange(6)
    for stream, starts in (
        (None, None),
        ([1, 2], np.array([0])),
        (torch.arange(3), np.array([0])),
        (tokens, [0]),
        (tokens / 2, np.array([0])),
        (tokens.reshape(2, 3), np.array([0])),
        (tokens, np.array([0.0])),
        (tokens, np.array([[0]])),
        (tokens, np.array([3, 0])),
        (tokens, np.array([-1, 0])),
        (tokens, np.array([0, 7])),
    ):
        with pytest.raises((TypeError, spmd.errors.DataError), match=REFUSED):
            TokenStream(stream, starts)
    with pytest.raises(TypeError, match=REFUSED):
        TokenStream.separated([5, 1, 5, 2], 5)
    for starts in (np.array([]), np.array([0, 3, 3, 6]), np.array([2], np.uint16)):
        assert TokenStream(tokens, starts).lengths.sum() == (6 - starts[0] if len(starts) else 0)
