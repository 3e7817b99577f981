"""Every preset counts the parameters of its real model, and the published ones have their sizes."""

import pytest
import torch

from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS, ModelPreset


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_counted_parameters_are_those_of_the_model(preset: ModelPreset) -> None:
    with torch.device("meta"):
        model = build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)
    assert preset.num_params() == sum(parameter.numel() for parameter in model.parameters())
    assert preset.width % preset.num_heads == preset.num_heads % preset.num_kv_heads == 0


def test_published_sizes() -> None:
    assert PRESETS["7B"].num_params() == 6_738_415_616
    assert PRESETS["13B"].num_params() == 13_015_864_320
    assert PRESETS["70B"].num_params() == 68_976_648_192
    # Llama 3.2 1B has one table for both ends.
    tied = PRESETS["1B"].num_params() - PRESETS["1B"].vocab_size * PRESETS["1B"].width
    assert tied == 1_235_814_400
