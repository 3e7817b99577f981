"""A slice of the comparison of strides agrees with eager torch; planted differences are found."""

import copy
from collections.abc import Callable

import pytest
import torch
from tiers import exhaustive

from benchmarks import strides
from benchmarks.opinfo import samples

ENTRIES = {op.formatted_name: op for op in samples.entries()}
SLICE = [
    "add", "copysign", "fft_rfftn", "nonzero", "nn_functional_batch_norm", "sort", "cat", "matmul",
    "nn_functional_conv2d", "sum", "index_select",
]  # fmt: skip
NAMES = [
    name if name in SLICE else exhaustive(name, id=name)
    for number, name in enumerate(ENTRIES)
    if number % 5 == 1 or name in SLICE
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:the shape of the result")
def test_results_have_eager_torchs_strides(name: str) -> None:
    counts, found = strides.examine(ENTRIES[name], limit=2)
    assert not found or strides.known(name) is not None, found
    assert name not in SLICE or counts["call"]


def test_the_layouts_are_what_they_are_called() -> None:
    x = torch.arange(24.0).view(1, 2, 3, 4)
    made = {name: function(x) for name, function in strides.LAYOUTS.items()}
    for name in set(made) - {"expanded"}:
        assert torch.equal(made[name], x)
    assert made["transposed"].stride() == (1, 1, 2, 6)
    assert made["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert made["sliced"].stride() == (384, 96, 16, 2)
    assert torch.equal(made["expanded"], x) and strides.LAYOUTS["expanded"](x[0]).stride(0) == 0


@pytest.mark.parametrize("wrong", [lambda x: x.contiguous(), lambda x: x[:0]])
def test_a_difference_is_found(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    op = copy.copy(ENTRIES["clone"])
    op.op = lambda x, **k: wrong(x) if x.device.type == "xla" else torch.clone(x, **k)
    op.supports_out = op.supports_autograd = False
    _, found = strides.examine(op)
    assert found and "instead of" in found[0].detail
    assert "clone, " in strides._table(strides.Counter(call=len(found)), found).markdown()
