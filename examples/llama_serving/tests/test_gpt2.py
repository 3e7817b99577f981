"""A GPT-2 is served like a Llama: the tokens are those of transformers' `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import spmd_core as spmd
from examples.llama_serving.loading import ModelFolderError, end_tokens, load_model, read_config
from examples.llama_serving.programs import Programs, Prompt
from examples.llama_serving.tests.tiny import tensor_mesh

pytestmark = pytest.mark.one_device
LENGTH, SLOTS = 32, 2


def save(folder: Path, **changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(5)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 8}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, initializer_range=0.15, eos_token_id=96, pad_token_id=96)
    )
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model.eval()


def prompt(length: int) -> list[int]:
    return torch.randint(96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def name_the_inner_model(folder: Path) -> None:
    """As in the files of the first GPT-2: other names, and the causal mask of each layer."""
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("first_names", [False, True])
def test_tokens_are_those_of_generate(tmp_path: Path, num_devices: int, first_names: bool) -> None:
    reference = save(tmp_path)
    if first_names:
        name_the_inner_model(tmp_path)
    mesh = tensor_mesh(num_devices)
    config = read_config(tmp_path)
    model = load_model(tmp_path, config, dtype=torch.float32, mesh=mesh)
    assert end_tokens(model) == [96]
    if first_names:
        ids = torch.tensor([prompt(9)])
        found, expected = model(ids.to("xla"), use_cache=False).logits.cpu(), reference(ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        return
    spmd.scan_model(model)  # warns if the layers cannot run as one loop
    if mesh is not None:
        assert model.transformer.wte.weight.partition_spec == ("tensor", None)
    programs = Programs(model, num_slots=SLOTS, length=LENGTH, mesh=mesh)
    programs.sizes.rows = lambda bucket: (1,)  # type: ignore[method-assign]
    list(programs.compile_all())
    compiles = spmd.metrics.counter("compiles")
    found = {
        slot: programs.prefill([Prompt(slot, prompt(length))]).tolist()
        for slot, length in ((0, 5), (1, 20))
    }
    for _ in range(6):
        for slot, token in enumerate(programs.decode().tolist()):
            found[slot].append(token)
    assert spmd.metrics.counter("compiles") == compiles
    for slot, length in ((0, 5), (1, 20)):
        ids = torch.tensor([prompt(length)])
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 7}
        expected = reference.generate(ids, do_sample=False, **options)[0, length:].tolist()
        assert found[slot][: len(expected)] == expected


def test_what_is_no_gpt2(tmp_path: Path) -> None:
    for changes, message in (
        ({"n_head": 7}, "describe a GPT-2; n_head must divide n_embd; got 7 for 64"),
        ({"n_layer": 2.5}, r"n_layer must be a whole number of at least 1; got 2\.5"),
        ({"add_cross_attention": True}, "add_cross_attention must be false"),
    ):
        save(tmp_path, **changes)
        with pytest.raises(ModelFolderError, match=message):
            read_config(tmp_path)
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["other"] = tensors.pop("transformer.ln_f.bias")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        spmd.errors.DataError, match=r"1 missing \(transformer\.ln_f\.bias\) and 1 unexpected \(oth"
    ):
        load_model(tmp_path, read_config(tmp_path), dtype=None, mesh=None)
