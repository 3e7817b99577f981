"""Every preset counts the parameters of its real model, and its size fits its name."""

import pytest
import torch

from examples.gpt2.model import build_model
from examples.gpt2.presets import PRESETS, ModelPreset, padded_vocab


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("multiple", [1, 128])
def test_counted_parameters_are_those_of_the_model(preset: ModelPreset, multiple: int) -> None:
    vocab_size = padded_vocab(preset.vocab_size, multiple)
    with torch.device("meta"):
        model = build_model(preset, vocab_size=vocab_size, dropout=0.0)
    assert preset.num_params(vocab_size) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert model.lm_head.weight is model.transformer.wte.weight


def test_published_sizes() -> None:
    assert PRESETS["124M"].num_params() == 124_439_808
    assert PRESETS["350M"].num_params() == 354_823_168
    assert PRESETS["1.5B"].num_params() == 1_557_611_200


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_sizes_fit_together(preset: ModelPreset) -> None:
    assert preset.width % preset.num_heads == 0
    assert preset.seq <= preset.positions
    if preset.name[-1] in "MB":
        named = float(preset.name[:-1]) * {"M": 1e6, "B": 1e9}[preset.name[-1]]
        assert abs(preset.num_params() - named) < 0.08 * named


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "padded"),
    [(50257, 128, 50304), (50304, 128, 50304), (50257, 1, 50257), (1, 128, 128)],
)
def test_padded_vocab(vocab_size: int, multiple: int, padded: int) -> None:
    assert padded_vocab(vocab_size, multiple) == padded
