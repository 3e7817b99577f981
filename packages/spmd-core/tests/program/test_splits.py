"""What the rules for the partitioner ask of the splits of a program."""

import pytest

from spmd_core.program.splits import Splits


@pytest.mark.parametrize(
    ("uneven", "size", "even"), [((), 5, 5), ((4,), 5, 8), ((4, 6), 5, 12), ((2, 8), 16, 16)]
)
def test_sizes_that_all_numbers_of_shards_divide(uneven, size, even):
    splits = Splits(lambda x, num: x, 8, uneven=frozenset(uneven))
    assert splits.even_size(size) == even
