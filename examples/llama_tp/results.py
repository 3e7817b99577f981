"""What a Llama run writes beside its report: a continued prompt, adapters, the model."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_tp import lora, weights
from examples.llama_tp.config import TrainConfig
from examples.training.text import TextData


def files(config: TrainConfig) -> dict[str, str]:
    """A file of each folder that the options name, by the option; empty where none is named."""
    return {
        "--export": config.export and f"{config.export}/config.json",
        "--adapters": config.adapters and f"{config.adapters}/adapter_config.json",
    }


def write(config: TrainConfig, model: LlamaForCausalLM, adapted: Any, text: TextData) -> None:
    """Prints and writes what the options ask for. Waits for the device. A plan has no values.

    Args:
        config: the options.
        model: what was trained, or what adapters were added to.
        adapted: what `lora.add` returned; None without adapters, which --export merges.
        text: has the tokenizer.

    Raises:
        SaveError: a file could not be written.
    """
    if spmd.is_planning():
        return
    if config.prompt:
        print(continued(model, text, config.prompt, num_tokens=config.new_tokens))
    if config.adapters:
        lora.save(adapted, config.adapters)
    if config.export:
        merged = adapted.merge_and_unload() if adapted else model
        weights.export(merged, text, config.export, source=config.weights)


def continued(model: LlamaForCausalLM, text: TextData, prompt: str, *, num_tokens: int) -> str:
    """The prompt and its likeliest continuation, token by token. Waits for the device."""
    ids = [text.separator, *text.tokenizer.encode(prompt, add_special_tokens=False).ids]
    ids_BT = torch.tensor([ids], device=model.device)
    model.eval()
    found_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=text.separator,
    )
    model.train()
    return text.tokenizer.decode(found_BT[0].tolist()[1:])
