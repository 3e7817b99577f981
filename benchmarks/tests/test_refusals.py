"""A slice of the comparison of refusals agrees with eager torch; planted differences are found."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import exhaustive

from benchmarks import refusals
from benchmarks.opinfo import samples
from benchmarks.refusals import Finding

ENTRIES = {op.formatted_name: op for op in samples.entries()}
SLICE = ["add", "mm", "softmax", "index_add", "clamp", "nn_functional_gelu", "sub", "lerp"]
NAMES = [
    name if name in SLICE[:5] else exhaustive(name, id=name)
    for number, name in enumerate(ENTRIES)
    if number % 5 == 0 or name in SLICE
]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_what_eager_torch_refuses(name: str) -> None:
    counts, found = refusals.examine(ENTRIES[name])
    unknown = [d for d in found if refusals.known(d.entry, d.finding) is None]
    assert not unknown
    assert name not in SLICE or (counts["both refuse"] and counts["both accept"])


def changed(function: Callable[[torch.Tensor], Any]) -> Any:
    """The entry of `gelu`, doing something else on the device."""
    op = copy.copy(ENTRIES["nn_functional_gelu"])
    right = op.op
    op.op = lambda x, **options: function(x) if x.device.type == "xla" else right(x, **options)
    return op


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("function", "finding"),
    [
        (torch.zeros_like, Finding.ACCEPTED),
        (refuse, Finding.REFUSED),
        (refuse, Finding.TYPE),
        (lambda x: torch.zeros_like(x, dtype=torch.int8), Finding.RESULT),
        (lambda x: x[None], Finding.RESULT),
    ],
)
def test_a_difference_is_found(function: Callable[[torch.Tensor], Any], finding: Finding) -> None:
    _, found = refusals.examine(changed(function))
    assert finding in {d.finding for d in found}
    assert all(d.entry == "nn_functional_gelu" and "instead of" in d.detail for d in found)


def test_the_table_counts_and_names() -> None:
    counts, found = refusals.examine(changed(torch.zeros_like))
    text = refusals._table(counts, found).markdown()
    assert f"| {Finding.ACCEPTED} | " in text
    assert "nn_functional_gelu, " in text and "call(int64): int64" in text
