"""What a Llama run writes beside its report: a continued prompt, adapters, the model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_serving.loading import end_tokens, has_dynamic_rope
from examples.llama_serving.programs import Programs, Prompt
from examples.llama_tp import lora, weights
from examples.llama_tp.config import TrainConfig
from examples.training.evaluation import evaluating
from examples.training.journal import found_mesh
from examples.training.text import TextData


def files(config: TrainConfig) -> dict[str, str]:
    """A file of each folder that the options name, by the option; empty where none is named."""
    return {
        "--export": config.export and f"{config.export}/config.json",
        "--adapters": config.adapters and f"{config.adapters}/adapter_config.json",
    }


def describe(config: TrainConfig, model: LlamaForCausalLM, adapted: Any, text: TextData) -> None:
    """Makes the folder of --checkpoint one for --weights and the server: sizes and tokenizer.

    Args:
        config: the options.
        model: what is trained, or what adapters were added to.
        adapted: what `lora.add` returned; None without adapters.
        text: has the tokenizer.

    Raises:
        SaveError: a file could not be written.
    """
    if config.checkpoint and not spmd.debugging.is_planning():
        if adapted:
            lora.describe(adapted, config.checkpoint)
        weights.describe(
            model, text, config.checkpoint, source=config.weights, option="--checkpoint"
        )


def write(
    config: TrainConfig,
    model: LlamaForCausalLM,
    adapted: Any,
    text: TextData,
    mesh: spmd.Mesh | None,
) -> None:
    """Prints and writes what the options ask for. Waits for the device. A plan has no values.

    Args:
        config: the options.
        model: what was trained, or what adapters were added to.
        adapted: what `lora.add` returned; None without adapters, which --export merges.
        text: has the tokenizer.
        mesh: what the model is laid out over, if anything; not of --mesh auto, whose marks say it.

    Raises:
        SaveError: a file could not be written.
    """
    if spmd.debugging.is_planning():
        return
    if config.finds_mesh:
        spmd.use_spmd()  # what follows is laid out as the steps were
        mesh = found_mesh(model)
    if config.prompt:
        print(continued(model, text, config.prompt, num_tokens=config.new_tokens, mesh=mesh))
    if config.adapters:
        lora.save(adapted, config.adapters)
    if config.export:
        merged = adapted.merge_and_unload() if adapted else model
        weights.export(merged, text, config.export, source=config.weights)


def continued(
    model: LlamaForCausalLM,
    text: TextData,
    prompt: str,
    *,
    num_tokens: int,
    mesh: spmd.Mesh | None,
) -> str:
    """The prompt and its likeliest continuation, up to the end of a text. Waits for the device."""
    ids = [text.separator, *text.tokenizer.encode(prompt, add_special_tokens=False).ids]
    with evaluating(model):
        if model.device.type == "xla" and not has_dynamic_rope(model.config):
            found = list(_on_device(model, ids, num_tokens, mesh))
        else:
            found = _by_transformers(model, ids, num_tokens, padding=text.separator)
    return text.tokenizer.decode(ids[1:] + found)


def _on_device(
    model: LlamaForCausalLM, ids: Sequence[int], num_tokens: int, mesh: spmd.Mesh | None
) -> Iterator[int]:
    """The tokens after a prompt by the server's programs, whose one slot it takes."""
    ends = end_tokens(model)
    programs = Programs(model, num_slots=1, length=len(ids) + num_tokens, mesh=mesh)
    sent = programs.prefill([Prompt(0, ids)])
    for left in reversed(range(num_tokens)):
        unread, sent = sent, programs.decode() if left else sent  # sent before one is read
        yield (token := int(unread))
        if token in ends:
            return


def _by_transformers(
    model: LlamaForCausalLM, ids: Sequence[int], num_tokens: int, *, padding: int
) -> list[int]:
    ids_BT = torch.tensor([ids], device=model.device)
    found_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=padding,
    )
    found: list[int] = found_BT[0, len(ids) :].tolist()
    return found
