"""Plain values come back as they were, and whatever would need a pickle is refused."""

import json
import math

import numpy as np
import pytest
import torch

from spmd_core.checkpoint import plain
from spmd_core.errors import CheckpointError


def there_and_back(value):
    """A value after JSON's text; tensors are kept beside it."""
    kept = {}

    def pack(path, tensor):
        kept[path] = tensor
        return {plain.KIND: plain.TENSOR, "name": path}

    text = json.dumps(plain.encode("part", value, pack), allow_nan=False)
    return plain.decode("part", json.loads(text), lambda path, node: kept[node["name"]])


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**80), 1.5, -math.inf, "text", "", b"\0\xff", 1 + 2j),
        *([], [1, [2.0, None]], (), (1, ("a",)), {3, 1}, torch.Size([2, 3])),
        *({}, {"a": {"b": 1}}, {1: "one", (2, 3): {"$": "dict"}}, {"$": 1}),
        *(torch.bfloat16, torch.device("cpu"), np.float32(0.1), np.int64(7)),
    ],
    ids=repr,
)
def test_there_and_back(value):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


def test_not_a_number_and_tensors_in_structures():
    assert math.isnan(there_and_back(math.nan))
    tensor = torch.arange(3)
    found = there_and_back({"a": [tensor, (tensor,)]})
    assert found["a"][0] is tensor and found["a"][1][0] is tensor
    array = np.arange(4, dtype=np.uint32)
    assert np.array_equal(there_and_back({"random": array})["random"], array)


def test_the_order_of_a_set_is_always_the_same():
    assert plain.encode("", {"b", "a", "c"}, None)["items"] == ["a", "b", "c"]


class Settings:
    pass


@pytest.mark.parametrize("value", [Settings(), lambda: 0, Settings, np.array(["a"])])
def test_an_object_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError, match=r"at 'part\.a\.1'.*nothing is pickled"):
        there_and_back({"a": [0, value]})


def test_a_class_of_lists_is_refused():
    class Mine(list):
        pass

    with pytest.raises(CheckpointError, match=r"no classes that derive.*got a .*Mine at 'part'"):
        there_and_back(Mine([1]))
