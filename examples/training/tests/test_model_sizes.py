"""Presets of sizes that no model has are refused where they are written."""

import dataclasses
import math
import re
from typing import Any

import pytest

from examples.gpt2 import presets as gpt2
from examples.llama_tp import presets as llama
from examples.training.knobs import KnobError


@pytest.mark.parametrize("preset", [gpt2.PRESETS["smoke"], llama.PRESETS["debug"]])
def test_numbers_of_a_preset(preset: Any) -> None:
    for field in dataclasses.fields(preset):
        if field.type is str:
            continue
        bad: list[Any] = [0, -1, math.nan, math.inf, True, "2", None]
        bad += [2.5, 2.0] if field.type is int else []
        for value in bad:
            message = re.escape(f"{field.name} of the preset {preset.name!r} must be ")
            with pytest.raises(
                KnobError, match=rf"{message}.*; got {value!r}\. Write for instance"
            ):
                dataclasses.replace(preset, **{field.name: value})


def test_numbers_that_do_not_fit_together() -> None:
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (gpt2.PRESETS["smoke"], {"num_heads": 3}, "num_heads of the preset 'smoke' must divide"),
        (gpt2.PRESETS["smoke"], {"seq": 129}, "must not pass its positions; got 129 of 128"),
        (llama.PRESETS["debug"], {"num_kv_heads": 3}, "num_kv_heads of the preset 'debug' must"),
    )
    for preset, changed, message in cases:
        with pytest.raises(KnobError, match=message):
            dataclasses.replace(preset, **changed)
    with pytest.raises(KnobError, match=r"got 3 for 64\. Write for instance width=63"):
        dataclasses.replace(gpt2.PRESETS["smoke"], num_heads=3)
    assert dataclasses.replace(gpt2.PRESETS["smoke"], num_heads=3, width=63).width == 63
