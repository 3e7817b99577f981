"""Tests which spec each tensor of a batch gets: structures, functions, arrays, and errors."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_data import InputSharding, OptionalKeys
from spmd_data.matching import MissingShardingError, matched, may_give_parts

MESH = spmd.Mesh(range(8), (4, 2), ("data", "model"))
ROWS = spmd.ShardingSpec(MESH, ("data",))
BOTH = spmd.ShardingSpec(MESH, ("data", "model"))
X, Y = torch.zeros(8, 6), torch.zeros(8)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any


def specs(batch: Any, sharding: InputSharding) -> dict[Any, Any]:
    return {
        leaf.path: None if leaf.spec is None else leaf.spec.partition_spec
        for leaf in matched(batch, sharding)[1]
    }


@pytest.mark.parametrize(
    ("batch", "sharding", "expected"),
    [
        (X, None, {(): None}),
        (X, BOTH, {(): ("data", "model")}),
        (Y, BOTH, {(): ("data",)}),
        (torch.tensor(1.0), BOTH, {(): None}),
        ({"a": X, "b": [Y, "s"]}, ROWS, {("a",): ("data", None), ("b", 0): ("data",)}),
        ([X, Y], [BOTH, None], {(0,): ("data", "model"), (1,): None}),
        ((X, Y), [None, ROWS], {(0,): None, (1,): ("data",)}),
        (Pair(X, Y), Pair(BOTH, ROWS), {(0,): ("data", "model"), (1,): ("data",)}),
        (Record(X, {"z": Y}), Record(None, ROWS), {("x",): None, ("y", "z"): ("data",)}),
        (
            {"a": {"b": [X, (Y, 3)]}, "c": "text"},
            {"a": {"b": [BOTH, (ROWS, None)]}, "c": None},
            {("a", "b", 0): ("data", "model"), ("a", "b", 1, 0): ("data",)},
        ),
        (
            collections.UserDict(x=X),  # like transformers' BatchEncoding
            OptionalKeys(x=ROWS, y=ROWS),
            {("x",): ("data", None)},
        ),
    ],
)
def test_structures(batch: Any, sharding: Any, expected: dict[Any, Any]) -> None:
    assert specs(batch, sharding) == expected
    assert matched(batch, sharding)[0] is batch


def test_a_function_sees_paths_and_tensors() -> None:
    def by_rank(path: Any, tensor: torch.Tensor) -> spmd.ShardingSpec | None:
        return BOTH if tensor.ndim == 2 and path[-1] != "table" else None

    batch = {"x": X, "table": X, "more": [Y, X]}
    assert specs(batch, by_rank) == {
        ("x",): ("data", "model"),
        ("table",): None,
        ("more", 0): None,
        ("more", 1): ("data", "model"),
    }
    assert specs(batch, {"x": by_rank, "table": ROWS, "more": None})["table",] == ("data", None)


def test_arrays_become_tensors_over_the_same_memory() -> None:
    array = np.arange(6.0).reshape(2, 3)
    frozen = np.ones(3, np.float16)
    frozen.flags.writeable = False
    words = np.array(["a", "b"])
    things = np.array([None, "b"], dtype=object)
    records = np.zeros(2, dtype=[("a", int)])
    batch = {"x": array, "f": frozen, "words": words, "things": things, "records": records}
    made, leaves = matched(batch, None)
    assert made["words"] is words and made["things"] is things and made["records"] is records
    assert made["x"].dtype == torch.float64 and made["f"].dtype == torch.float16
    array[0, 0] = 7.0
    assert made["x"][0, 0] == 7.0 and len(leaves) == 2
    assert type(batch["x"]) is np.ndarray, "the batch itself stays"
    assert type(matched(Pair(array, 1), None)[0]) is Pair
    assert torch.equal(matched(Record([array], 1), None)[0].x[0], torch.from_numpy(array))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0)[::-2],
        np.arange(4.0).reshape(1, 4)[::-1],  # contiguous by numpy's flag
        np.zeros((0, 3))[::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6, dtype=">i4"),
        np.array(3, ">f8"),
    ],
)
def test_arrays_that_torch_does_not_take_are_copied(array: np.ndarray) -> None:
    made, _ = matched(array, None)
    assert made.tolist() == array.tolist() and made.shape == array.shape


@pytest.mark.parametrize(
    ("batch", "sharding", "message"),
    [
        (
            {"x": X},
            {"x": ROWS, "y": ROWS, "z": None},
            r"for a key of the batch; got shardings for the keys \['y'\], and batch has \['x'\]\. "
            r"Remove them, or pass spmd_data\.OptionalKeys",
        ),
        (
            (X,),
            {"x": ROWS},
            r"must be a dict when input_sharding is a dict; got a batch of type tuple for the keys "
            r"\['x'\]",
        ),
        ({"a": X}, {"a": {"b": ROWS}}, r"got a value of type Tensor at batch\['a'\] for the keys"),
        (
            [X, Y],
            [ROWS],
            r"must have the structure of the batch, or one spec .*; got a list with \[0\] for a "
            r"list with \[0, 1\] at batch\. Give one entry for each part",
        ),
        (X, [ROWS], r"got a list with \[0\] for a Tensor at batch"),
        ({"a": X}, Record(ROWS, None), r"got a Record with \['x', 'y'\] for a dict with \['a'\]"),
        (
            {"names": ["a", "b"]},
            {"names": ROWS},
            r"a sharding is for a tensor; got a list at batch\['names'\], without any\. "
            r"Give None in its place",
        ),
        ([None, X], [ROWS, ROWS], r"got a NoneType at batch\[0\], without any"),
        (
            {"y": Y},
            {"y": BOTH},
            r"the dims that a sharding splits must exist; got the partition spec "
            r"\('data', 'model'\) for batch\['y'\] of shape \(8,\)\. Give it at most 1 entries",
        ),
        (Y, lambda path, tensor: BOTH, r"must exist; got .* for batch of shape \(8,\)"),
        (
            {"ids": [torch.zeros(5), torch.zeros(7)]},
            {"ids": ROWS},
            r"rows of a batch must have one shape to become one tensor; got 2 arrays of shapes "
            r"\(5,\), \(7,\) at batch\['ids'\]\. Pad or pack them",
        ),
        (
            {"ids": np.array([np.zeros(5), np.zeros(7), np.zeros(1)], dtype=object)},
            ROWS,
            r"got 3 arrays of shapes \(5,\), \(7,\), \(1,\) at batch\['ids'\]",
        ),
        (X, "data", r"must be a ShardingSpec or None; got str for batch\. Pass for instance"),
        (X, lambda path, tensor: ("data",), r"must be a ShardingSpec or None; got tuple for batch"),
    ],
)
def test_what_does_not_match_is_an_error(batch: Any, sharding: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        matched(batch, sharding)


def test_a_missing_key_is_named_at_any_depth() -> None:
    with pytest.raises(MissingShardingError, match=r"the keys \['y'\] are missing") as caught:
        matched({"a": {"x": X, "y": Y}}, {"a": {"x": ROWS}})
    assert caught.value.missing == ["y"]
    matched({"a": {"x": X, "y": Y}}, {"a": {"x": ROWS, "y": None}})  # the advice


def test_the_advice_for_absent_dims() -> None:
    assert specs({"y": Y}, {"y": ROWS}) == {("y",): ("data",)}
    # One spec for images and labels: the spec's first entries, as ever.
    assert specs([X, Y], BOTH) == {(0,): ("data", "model"), (1,): ("data",)}


def test_a_tensor_at_two_places_has_the_spec_of_each() -> None:
    batch = {"a": X, "b": X, "c": [X]}
    out, leaves = matched(batch, {"a": BOTH, "b": None, "c": ROWS})
    assert [leaf.spec and leaf.spec.partition_spec for leaf in leaves] == [
        ("data", "model"),
        None,
        ("data", None),
    ]
    # By identity, as the batch is built: an object of its own for each spec, over one memory.
    assert [leaf.tensor for leaf in leaves] == [out["a"], out["b"], out["c"][0]]
    assert len({id(leaf.tensor) for leaf in leaves}) == 3 and batch["b"] is X
    assert len({leaf.tensor.data_ptr() for leaf in leaves}) == 1
    alike, _ = matched(batch, ROWS)
    assert alike["a"] is alike["b"] is alike["c"][0] is X


def test_which_shardings_may_give_parts() -> None:
    part = dataclasses.replace(ROWS, minibatch=True)
    for sharding in (part, {"a": [None, (ROWS, part)]}, Record(ROWS, part), lambda *_: None):
        assert may_give_parts(sharding)
    for sharding in (None, ROWS, {"a": [None, (ROWS, BOTH)]}, OptionalKeys(a=ROWS), ()):
        assert not may_give_parts(sharding)
