"""Distinct elements and rows, and runs of equal ones: the host reads how many there are, once."""

import pytest
import torch
from data_dependent import both, quiet, reads, t

pytestmark = pytest.mark.one_device
NAN = float("nan")
ALL = {"return_inverse": True, "return_counts": True}
CASES = {
    "unique": lambda d: t(d, 3, 1, 2, 1, 3).unique(**ALL),
    "unique of floats": lambda d: t(d, 3.0, NAN, 2, NAN, 3).unique(**ALL),
    "unique of bools": lambda d: t(d, True, False, True).unique(),
    "unique of nothing": lambda d: torch.zeros(0, device=d).unique(**ALL),
    "unique rows": lambda d: t(d, [1, 2], [1, 1], [1, 2], [0, 5]).unique(dim=0, **ALL),
    "unique long rows": lambda d: (torch.arange(60, device=d) % 4).view(12, 5).unique(dim=0, **ALL),
    "unique columns": lambda d: t(d, [1, 2, 1], [1, 1, 1]).unique(dim=1, **ALL),
    "unique of no rows": lambda d: torch.zeros(0, 3, device=d).unique(dim=0, **ALL),
    "unique_consecutive": lambda d: t(d, 1, 1, 2, 2, 1).unique_consecutive(**ALL),
    "unique_consecutive rows": lambda d: t(d, [1, 2], [1, 2], [0, 0]).unique_consecutive(
        dim=0, **ALL
    ),
}


@quiet
@pytest.mark.parametrize("name", CASES)
def test_read_once_and_right(name):
    before = reads()
    both(CASES[name])
    assert reads() > before or "nothing" in name or "no rows" in name


@quiet
def test_empty_rows_are_refused_as_on_the_cpu():
    assert isinstance(both(lambda d: torch.zeros(2, 0, device=d).unique(dim=0)), Exception)
