"""Values between processes: the same on the other side, and nothing that runs."""

import math
import pickle

import numpy as np
import pytest
import torch

from torch_xla import _exchanged


def there(value):
    return _exchanged.from_bytes(_exchanged.to_bytes(value))


def test_values_are_the_same_on_the_other_side():
    value = {"a": [1, 2.5, None, True, "text"], 3: (b"\x00\xff", {"tuple": ()}, [])}
    assert there(value) == value
    assert [type(x) for x in there((1, 1.0, True))] == [int, float, bool]
    assert math.isnan(there(math.nan)) and there(-math.inf) == -math.inf and there(0.1) == 0.1
    for array in (np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2), np.int8), np.float32(0.1)):
        back = there(array)
        assert type(back) is type(array) and back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3, dtype=torch.int64),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([1 + 2j]),
    ],
    ids=str,
)
def test_tensors_are_the_same_on_the_other_side(tensor):
    back = there(tensor)
    assert back.dtype == tensor.dtype and torch.equal(back, tensor) and back.shape == tensor.shape
    back.add_(1) if back.dtype != torch.bool else back.logical_not_()  # it is its own memory


def test_other_objects_are_refused_where_they_are_given():
    class Own:
        pass

    with pytest.raises(TypeError, match=r"lists, tuples and dicts of these; got .*Own. Pass its"):
        _exchanged.to_bytes([Own()])
    with pytest.raises(TypeError, match=r"got numpy.ndarray"):
        _exchanged.to_bytes(np.array([Own()]))


def test_a_pickle_is_no_value():
    with pytest.raises(UnicodeDecodeError):
        _exchanged.from_bytes(pickle.dumps(3.0))
