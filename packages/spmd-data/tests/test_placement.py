"""Tests the placement of one batch: structures, specs by rank, errors of input_sharding."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import spmd_core as spmd
from spmd_core.errors import DataError, SpmdError
from spmd_core.steps.structures import map_tensors
from spmd_data.matching import MissingShardingError, fitted_spec
from spmd_data.placement import BatchPlacement, UnevenBatch

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


def placement(input_sharding: Any, uneven_batch: UnevenBatch = UnevenBatch.KEEP) -> BatchPlacement:
    return BatchPlacement(XLA, input_sharding, uneven_batch)


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
        BatchPlacement(torch.device("cpu"), spec, UnevenBatch.KEEP)
    BatchPlacement(torch.device("cpu"), None, UnevenBatch.KEEP)  # the other half of the advice


def test_a_dict_sharding_needs_dict_batches() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    with pytest.raises(
        DataError,
        match=r"the input batch must be a dict when input_sharding is a dict; "
        r"got a batch of type tuple for the keys \['x'\]",
    ):
        placement({"x": spec}).prepare((torch.zeros(8),))


def test_a_key_without_a_sharding_is_named() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    with pytest.raises(
        MissingShardingError,
        match=r"^input_sharding must .* the keys \['y', 'z'\] are missing from it, "
        r"got \['x'\]\. Add them",
    ) as caught:
        placement({"x": spec}).prepare({"x": torch.zeros(8), "y": torch.zeros(8), "z": 1})
    assert isinstance(caught.value, KeyError) and caught.value.missing == ["y", "z"]
    assert isinstance(caught.value, SpmdError)


def test_an_uneven_batch_is_an_error_or_dropped_when_asked() -> None:
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    spec = spmd.ShardingSpec(mesh, (("data", "model"), None))
    uneven = {"x": torch.zeros(12, 3), "y": 5}
    message = r"got dim 0 of batch\['x'\] with 12 rows for 8 shards\. Let the DataLoader drop"
    with pytest.raises(DataError, match=message):
        placement({"x": spec, "y": None}, UnevenBatch.ERROR).prepare(uneven)
    with pytest.raises(DataError, match=r"got dim 0 of batch\['x'\] with 12 rows for 8 shards"):
        placement(spec, UnevenBatch.ERROR).prepare(uneven)
    assert placement(spec, UnevenBatch.DROP).prepare(uneven) is None


def test_the_error_names_the_policies_and_each_can_be_taken() -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    x = torch.arange(5.0)
    with pytest.raises(
        DataError,
        match=r"got dim 0 of batch\[0\] with 5 rows for 8 shards\. Let the DataLoader drop .*"
        r"uneven_batch='drop' leaves .*'pad' fills .*'keep' runs .*'error' raises this",
    ):
        placement(spec, UnevenBatch.ERROR).prepare((x,))
    assert placement(spec, UnevenBatch.DROP).prepare((x,)) is None


def eager(batch: Any, full_rows: int | None) -> Any:
    """Pads without devices."""
    prepared = BatchPlacement(torch.device("cpu"), None, UnevenBatch.PAD, full_rows).prepare(batch)
    assert prepared is not None
    return prepared.batch


def test_padding_repeats_the_last_row_and_adds_a_mask() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    mask = torch.tensor([True, True, True, False])
    out = eager({"x": x, "names": ["a"], "scale": torch.tensor(2.0), "y": y}, 4)
    assert torch.equal(out["x"], torch.cat([x, x[-1:]])) and out["y"].tolist() == [0, 1, 2, 2]
    assert torch.equal(out["row_mask"], mask) and out["names"] == ["a"] and out["scale"] == 2
    pair = eager((x, y), 4)
    assert type(pair) is tuple and len(pair) == 3 and torch.equal(pair[2], mask)
    assert len(eager([x, y], 4)) == 3
    alone, its_mask = eager(x, 4)
    assert len(alone) == 4 and torch.equal(its_mask, mask)
    whole, every = eager(x, 3)
    assert torch.equal(whole, x) and every.all()


def test_what_cannot_be_padded_is_an_error() -> None:
    mesh = spmd.Mesh(range(8), (4, 2), ("data", "model"))
    rows = spmd.ShardingSpec(mesh, ("data",))
    both = spmd.ShardingSpec(mesh, ("data", "model"))
    x = torch.zeros(6, 3)
    for batch, sharding, message in (
        ((x, torch.zeros(7)), rows, r"all of one size; got the sizes \[6, 7\]\. Shard dim 0"),
        ((), rows, r"got the sizes \[\]"),
        ((x,), both, r"fills up rows, dim 0 alone; got dim 1 of batch\[0\] with 3 rows for 2 sh"),
        ({"row_mask": x}, rows, r"adds the key 'row_mask' .*; got one that has it, .*Rename"),
        (Pair(x, 1), rows, r"to dicts, lists, tuples and tensors; got a batch of type Pair\."),
    ):
        with pytest.raises(DataError, match=message):
            placement(sharding, UnevenBatch.PAD).prepare(batch)


NOT_DENSE = {
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("policy", ["keep", "pad"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_that_are_not_dense_are_refused(kind: str, policy: str) -> None:
    spec = spmd.ShardingSpec(spmd.Mesh(range(8), (8,), ("data",)), ("data",))
    batch = {"x": NOT_DENSE[kind](torch.zeros(8, 2))}
    for sharding in (spec, None):
        with pytest.raises(
            spmd.errors.UnsupportedOpError,
            match=rf"are dense; got batch\['x'\] of layout torch\..*makes a {kind} tensor there\. ",
        ):
            placement(sharding, UnevenBatch(policy)).prepare(batch)


def test_a_dtype_that_the_device_lacks_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"must have one of the dtypes .* got torch.float8_e4m3fnuz"
    ):
        placement(None).prepare([torch.zeros(8).to(torch.float8_e4m3fnuz)])


def test_a_batch_without_rows_cannot_be_padded() -> None:
    with pytest.raises(DataError, match=r"repeats the last row; got a batch of 0 rows for 4\."):
        eager(torch.zeros(0, 2), 4)
    assert len(eager(torch.zeros(0, 2), None)[0]) == 0
