"""What a folder must have to be served; each refusal names what was got."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from examples.llama_serving.loading import (
    ModelFolderError,
    end_tokens,
    load_model,
    read_config,
    read_tokenizer,
)
from examples.llama_serving.tests.tiny import END, tensor_mesh


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def test_a_folder_is_read(folder: Path, num_devices: int) -> None:
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, config)
    assert tokenizer.decode(tokenizer("the cat").input_ids) == "the cat"
    model = load_model(folder, config, dtype=torch.bfloat16, mesh=tensor_mesh(num_devices))
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16 and not model.training and not weight.requires_grad
    if num_devices > 1:
        assert weight.local_shards[0].data.shape == (96 // num_devices, 64)
    assert end_tokens(model) == [END]
    model.generation_config.eos_token_id = [1, 7]
    assert end_tokens(model) == [1, 7]


def test_missing_files(tmp_path: Path) -> None:
    message = (
        r"or that of a run's --checkpoint; got .*lacks config.json and \*.safetensors. Name an"
    )
    with pytest.raises(ModelFolderError, match=message):
        read_config(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFolderError, match=r"which lacks \*.safetensors"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json must be a JSON object; got something else"),
        ("[]", "config.json must be a JSON object; got something else"),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 12},
            r"got one that it refuses: .*size \(100\) is not a multiple .*Save the model again",
        ),
        *(
            ({"model_type": "llama", name: value}, f"{name} must be a whole .* at least 1; got")
            for name in ("num_attention_heads", "num_hidden_layers", "vocab_size")
            for value in (0, -4, 2.5, "8", True)
        ),
        (
            {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 3},
            "num_key_value_heads must divide num_attention_heads; got 3 for 8 heads in .* again",
        ),
        ({"model_type": "mistral"}, "must be of type 'llama' or 'gpt2'; got 'mistral' in"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "must not depend on the longest text of a step; got rope_type 'dynamic'. Serve a model",
        ),
    ],
)
def test_another_kind_of_model(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=message):
        read_config(write(tmp_path, config))


def test_a_tokenizer_must_be_there_and_fit(folder: Path, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=100)
    with pytest.raises(ModelFolderError, match="a tokenizer of 297 tokens and a vocabulary of 100"):
        read_tokenizer(folder, config)
    write(tmp_path, {"model_type": "llama"})
    for damaged in (None, "{}", "[]", "{", '{"model": {}}', '{"version": "1.0", "model": null}'):
        if damaged is not None:
            (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(ModelFolderError, match=r"tokenizer; got .* Save it|has none\. Save"):
            read_tokenizer(tmp_path, config)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"the folder must have a tokenizer; got .* Save it"):
        read_tokenizer(tmp_path, config)
