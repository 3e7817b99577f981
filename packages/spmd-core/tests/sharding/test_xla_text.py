"""XLA's text of shardings: lists of ids and iotas, against numpy."""

import numpy as np
import pytest

from spmd_core.errors import PartitionSpecError
from spmd_core.sharding import xla_text


def test_an_iota_of_three_dims_is_reshaped_and_transposed():
    # XLA's definition: reshape(transpose(reshape(iota, [2,3,4]), {1,2,0}), [6,4]).
    expected = np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0).reshape(6, 4)
    assert xla_text.iota((6, 4), (2, 3, 4), (1, 2, 0)).tolist() == expected.tolist()
    held, is_manual = xla_text.blocks("{devices=[6,4]<=[2,3,4]T(1,2,0)}", num_devices=24)
    assert [[ids[0] for ids in row] for row in held.tolist()] == expected.tolist()
    assert not is_manual


def test_an_iota_without_a_transpose():
    assert xla_text.iota((2, 4)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert xla_text.iota((4, 2), (8,)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_is_written_is_read():
    text = xla_text.tiled((2, 1, 2), (0, 2, 1, 3), is_partial=True)
    held, _ = xla_text.blocks(text, num_devices=4)
    assert held.shape == (2, 1) and held[0, 0] == [0, 2] and held[1, 0] == [1, 3]
    text = xla_text.tiled((4,), (3, 1, 0, 2), is_partial=False)
    assert xla_text.blocks(text, num_devices=4)[0].tolist() == [[3], [1], [0], [2]]


def test_texts_that_name_no_device():
    assert xla_text.blocks("{replicated}", num_devices=3)[0].item() == [0, 1, 2]
    held, is_manual = xla_text.blocks("{manual}", num_devices=2)
    assert held.item() == [0, 1] and is_manual
    assert xla_text.blocks("{maximal device=5}", num_devices=8)[0].item() == [5]


@pytest.mark.parametrize("text", ["", "{devices=[2]0}", "{devices=[2,2]<=[4]T(0,0)}", None])
def test_other_texts_are_refused(text):
    with pytest.raises(PartitionSpecError, match="got"):
        xla_text.blocks(text, num_devices=4)
