"""Loaders, devices, shardings, datasets and arrays are refused if they are none."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import spmd_core as spmd
import spmd_data
from spmd_data import (
    MpDeviceLoader,
    PackedSequences,
    TokenStream,
    TransformedSamples,
    sharded_dataloader,
)

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


def test_devices_that_hold_no_values():
    message = "device is 'xla', or a device on which this torch computes, such as 'cpu'; got '{}': "
    for device in ("meta", *(["cuda", "cuda:3"] if not torch.cuda.is_available() else [])):
        with pytest.raises(
            spmd.errors.DeviceMismatchError,
            match=re.escape(message.format(device)) + r".*\. Write device='xla'\.",
        ):
            MpDeviceLoader([X], device)


def test_more_threads_and_processes_than_a_host_has_are_refused_at_once(mesh):
    for call in (
        lambda: MpDeviceLoader([X], "xla", transfer_threads=10**6),
        lambda: MpDeviceLoader([X], "xla", prefetch=10**9),
        lambda: MpDeviceLoader([X], "xla", batches_per_execution=10**18),
        lambda: sharded_dataloader(SAMPLES, mesh, "data", batch_size=8, num_workers=10**6),
        lambda: PackedSequences(TokenStream(np.arange(9), np.array([0])), 10**12),
    ):
        with pytest.raises(ValueError, match=r"(at most|from \d to) \d+.*; got .*\d{6}"):
            call()
    MpDeviceLoader([X], "xla", transfer_threads=256, prefetch=1000)


NO_TEXTS = "documents are a list of texts, or another iterable of them"
NO_KEY = "key maps names to values of JSON's types"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"documents": value}, NO_TEXTS) for value in ("text", b"text", None, 5, {"a": "text"})),
        *(({"encode": value}, "encode is a function") for value in (5, None, "gpt2")),
        *(
            ({"key": value}, NO_KEY)
            for value in (5, None, "gpt2", ["gpt2"], {1: 2}, {"a": {1}}, {"a": print}, {"a": X})
        ),
        *(({"cache_dir": value}, "cache_dir is of type str or PathLike") for value in (5, None)),
        ({"cache_dir": __file__}, "cache_dir is a folder, or a path where one can be made"),
    ],
)
def test_what_a_cache_of_tokens_is_made_of(options, message, tmp_path):
    given = {
        "documents": ["text"],
        "encode": lambda texts: [[1] for _ in texts],
        "key": {},
        "cache_dir": tmp_path / "new",
    }
    with pytest.raises((TypeError, spmd.errors.DataError), match=f"^{message}.*" + REFUSED):
        spmd_data.cached_tokens(**{**given, **options}, progress=False)
    assert not list(tmp_path.iterdir())


def test_folders_of_caches_and_dicts_of_shardings(tmp_path):
    for folder in (5, None, ["folder"], tmp_path, tmp_path / "missing"):
        with pytest.raises(
            (TypeError, spmd.errors.DataError), match=REFUSED + r"cached_tokens\(\.\.\.\)"
        ):
            spmd_data.TokenCache(folder)
    for shardings in (5, "text", [1], [("x", None)], print):
        with pytest.raises(TypeError, match="^shardings is of type Mapping" + REFUSED):
            spmd_data.OptionalKeys(shardings)
    keys = spmd_data.OptionalKeys({"x": None}, y=None)
    assert keys == {"x": None, "y": None} and spmd_data.OptionalKeys() == {}
    for clone in (copy.copy(keys), copy.deepcopy(keys), pickle.loads(pickle.dumps(keys))):
        assert clone == keys and type(clone) is spmd_data.OptionalKeys


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
    for dataset in ("samples" * 8, {"a": 1}):
        with pytest.raises(
            TypeError, match="a dataset has a length and samples by index.*" + REFUSED
        ):
            spmd_data.shard_dataset(dataset, mesh, "data")
    assert len(spmd_data.shard_dataset(dict(enumerate(X)), mesh, "data")) == 8
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
    one = TokenStream(tokens, np.array([0]))
    for document in (-1, 1):
        with pytest.raises(
            IndexError, match=f"document {document} is out of range for 1 documents"
        ):
            one.tokens(document)
    with pytest.raises(ValueError, match="padding_token is a whole number from" + ".*" + REFUSED):
        PackedSequences(one, 4, padding_token=2**63)
    for starts in (np.array([]), np.array([0, 3, 3, 6]), np.array([2], np.uint16)):
        assert TokenStream(tokens, starts).lengths.sum() == (6 - starts[0] if len(starts) else 0)
