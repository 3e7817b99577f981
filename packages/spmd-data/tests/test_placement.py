"""Tests the placement of one batch: structures, specs by rank, errors of input_sharding."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import spmd_core as spmd
from spmd_core import DataError, SpmdError
from spmd_core.steps.structures import map_tensors
from spmd_data.matching import MissingShardingError, fitted_spec
from spmd_data.placement import Placement, UnevenBatch

XLA = torch.device("xla:0")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    name: str


class Encoding(collections.UserDict):
    """A mapping with an attribute beside its items, like transformers' BatchEncoding."""

    source = "unset"


def placement(input_sharding: Any, uneven_batch: UnevenBatch = UnevenBatch.KEEP) -> Placement:
    return Placement(XLA, input_sharding, uneven_batch)


def test_every_structure_is_rebuilt_as_its_own_type() -> None:
    x = torch.arange(3)
    encoding = Encoding({"x": x})
    encoding.source = "kept"
    batch = [
        x,
        (x, 1),
        {"a": x, "b": None},
        Pair(x, "text"),
        Record(x, "name"),
        encoding,
        collections.OrderedDict(a=x),
        {3, 4},
        Record,
    ]
    out = map_tensors(batch, lambda tensor: tensor + 1)
    assert [type(part) for part in out] == [type(part) for part in batch]
    assert out[5].source == "kept"
    tensors = [out[0], out[1][0], out[2]["a"], out[3].x, out[4].x, out[5]["x"], out[6]["a"]]
    assert all(torch.equal(tensor, x + 1) for tensor in tensors)
    assert (out[1][1], out[2]["b"], out[3].y, out[4].name, out[7], out[8]) == (
        1,
        None,
        "text",
        "name",
        {3, 4},
        Record,
    )
    assert torch.equal(batch[0], torch.arange(3))
    assert torch.equal(encoding["x"], torch.arange(3))


@pytest.mark.parametrize(
    ("ndim", "fitted"),
    [(0, ()), (1, ("data",)), (2, ("data", "model")), (4, ("data", "model", None, None))],
)
def test_a_spec_is_cut_or_filled_to_the_rank(ndim: int, fitted: tuple[str | None, ...]) -> None:
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    assert fitted_spec(spmd.ShardingSpec(mesh, ("data", "model")), ndim) == fitted


def test_a_sharding_needs_the_xla_device() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    with pytest.raises(
        DataError,
        match=r"only tensors on the xla device can be sharded; got .* device 'cpu'\. "
        r"Pass device='xla'",
    ):
        Placement(torch.device("cpu"), spec, UnevenBatch.KEEP)
    Placement(torch.device("cpu"), None, UnevenBatch.KEEP)  # the other half of the advice


def test_a_dict_sharding_needs_dict_batches() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    with pytest.raises(
        DataError,
        match=r"the input batch must be a dict when input_sharding is a dict; "
        r"got a batch of type tuple for the keys \['x'\]",
    ):
        placement({"x": spec}).place((torch.zeros(8),))


def test_a_key_without_a_sharding_is_named() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    with pytest.raises(
        MissingShardingError,
        match=r"^input_sharding must .* the keys \['y', 'z'\] are missing from it, "
        r"got \['x'\]\. Add them",
    ) as caught:
        placement({"x": spec}).place({"x": torch.zeros(8), "y": torch.zeros(8), "z": 1})
    assert isinstance(caught.value, KeyError) and caught.value.missing == ["y", "z"]
    assert isinstance(caught.value, SpmdError)


def test_an_uneven_batch_is_an_error_or_dropped_when_asked() -> None:
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    spec = spmd.ShardingSpec(mesh, (("data", "model"), None))
    uneven = {"x": torch.zeros(12, 3), "y": 5}
    message = r"got dim 0 of batch\['x'\] with 12 rows for 8 shards\. Let the DataLoader drop"
    with pytest.raises(DataError, match=message):
        placement({"x": spec, "y": None}, UnevenBatch.ERROR).place(uneven)
    with pytest.raises(DataError, match=r"got dim 0 of batch\['x'\] with 12 rows for 8 shards"):
        placement(spec, UnevenBatch.ERROR).place(uneven)
    assert placement(spec, UnevenBatch.DROP).place(uneven) is None
