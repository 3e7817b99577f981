"""A prompt is continued on the device as transformers continues it on the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

import spmd_core as spmd
from examples.llama_tp import shardings
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import PRESETS
from examples.llama_tp.results import continued

PROMPT, VOCAB = "abcdefg", 300


def text() -> Any:
    """A tokenizer of one character for each token."""
    tokenizer = Tokenizer(models.BPE({chr(97 + i): i for i in range(VOCAB)}, []))
    tokenizer.decoder = decoders.Fuse()
    return SimpleNamespace(tokenizer=tokenizer, separator=0)


def random_model(**options: Any) -> Any:
    torch.manual_seed(3)
    model = build_model(PRESETS["debug"], vocab_size=VOCAB, positions=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # so that tokens vary
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.one_device
def test_the_continuation_is_that_of_transformers(num_devices: int) -> None:
    right = continued(random_model(), text(), PROMPT, num_tokens=12, mesh=None)
    assert right.startswith(PROMPT) and len(right) == len(PROMPT) + 12
    mesh = None
    model = random_model().to("xla")
    if num_devices > 1:
        mesh = spmd.Mesh(range(num_devices), (1, num_devices), ("data", "tensor"))
        shardings.parallelize(model, mesh, sequence_parallel=False, loss_parallel=True)
    assert continued(model, text(), PROMPT, num_tokens=12, mesh=mesh) == right
    assert model.training
    assert continued(model, text(), PROMPT, num_tokens=1, mesh=mesh) == right[: len(PROMPT) + 1]
    # It ends where the model ends a text, also by one of several tokens.
    end = ord(right[len(PROMPT) + 4]) - 97
    assert end not in [ord(letter) - 97 for letter in right[len(PROMPT) : len(PROMPT) + 4]]
    shorter = continued(random_model(eos_token_id=[end]), text(), PROMPT, num_tokens=12, mesh=None)
    model.generation_config.eos_token_id = [VOCAB - 1, end]
    assert continued(model, text(), PROMPT, num_tokens=12, mesh=mesh) == shorter
    assert shorter == right[: len(PROMPT) + 5]


def test_positions_that_depend_on_the_length_go_on_by_transformers() -> None:
    right = continued(random_model(), text(), PROMPT, num_tokens=2, mesh=None)
    model = random_model().to("xla")
    model.config.rope_parameters["rope_type"] = "dynamic"  # its frequencies stay as they are
    programs = spmd.metrics.programs()
    assert continued(model, text(), PROMPT, num_tokens=2, mesh=None) == right
    new = spmd.metrics.programs()[len(programs) :]
    assert not any(program.name.startswith("prefill") for program in new)
