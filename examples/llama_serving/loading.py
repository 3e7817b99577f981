"""The folder of a model, of Hugging Face or of a run: what can be served, and what is in it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

import spmd_core as spmd
from examples.llama_serving import gpt2
from examples.llama_tp import shardings, weights
from examples.llama_tp.folder_sizes import wrong_size
from examples.training.attention import CAUSAL_SDPA

GENERATION = "generation_config.json"  # beside config.json, if there is one

# These compute their frequencies from the longest position of a step, which is on the device.
_DYNAMIC_ROPE = ("dynamic", "longrope")


_CONFIGS = {"llama": ("Llama", LlamaConfig), "gpt2": ("GPT-2", GPT2Config)}
ModelConfig: TypeAlias = LlamaConfig | GPT2Config
Model: TypeAlias = LlamaForCausalLM | GPT2LMHeadModel


class ModelFolderError(ValueError):
    """A folder has no model that can be served."""


def read_config(folder: Path) -> ModelConfig:
    """The model's sizes.

    Raises:
        ModelFolderError: the folder lacks a file, or has another kind of model.
    """
    missing = [name for name in ("config.json", "*.safetensors") if not [*folder.glob(name)]]
    if missing == ["*.safetensors"] and weights.has_steps(folder):
        missing = []
    if missing:
        raise ModelFolderError(
            "--model names a folder with config.json, safetensors and a tokenizer, or that of a "
            f"run's --checkpoint; got {folder}, which lacks {' and '.join(missing)}. Name another "
            "folder, or save the model there with save_pretrained."
        )
    try:
        found = json.loads((folder / "config.json").read_text())
        kind = found.get("model_type")
        wrong = gpt2.wrong_size(found) if kind == "gpt2" else wrong_size(found)
    except (ValueError, AttributeError) as error:
        raise ModelFolderError(
            f"config.json must be a JSON object; got something else: {error}. Save the model again."
        ) from None
    if kind not in _CONFIGS:
        raise ModelFolderError(
            f"the model must be of type 'llama' or 'gpt2'; got {kind!r} in {folder}. Name another "
            "folder."
        )
    name, config_class = _CONFIGS[kind]
    if wrong is not None:
        raise ModelFolderError(
            f"config.json must describe a {name}; {wrong} in {folder}. Save the model again."
        )
    try:
        config = config_class.from_pretrained(folder)
    except (ValueError, StrictDataclassError) as error:
        raise ModelFolderError(
            f"config.json must describe a {name} that transformers can build; got one that it "
            f"refuses: {_in_a_line(error)}. Save the model again."
        ) from None
    if has_dynamic_rope(config):
        raise ModelFolderError(
            "position embeddings must not depend on the longest text of a step; got rope_type "
            f"{config.rope_parameters['rope_type']!r}. Serve a model with 'default', 'linear', "
            "'yarn' or 'llama3'."
        )
    return config


def has_dynamic_rope(config: ModelConfig) -> bool:
    """Whether position embeddings depend on the longest text of a step."""
    return (getattr(config, "rope_parameters", None) or {}).get(
        "rope_type", "default"
    ) in _DYNAMIC_ROPE


def read_tokenizer(folder: Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ModelFolderError: there is none, or it has tokens that the model lacks.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the libraries raise nothing more special for damaged files
        raise ModelFolderError(
            f"the folder must have a tokenizer; got {folder}, whose tokenizer cannot be read: "
            f"{_in_a_line(error)}. Save it there with save_pretrained."
        ) from None
    if not len(tokenizer):
        raise ModelFolderError(
            f"a tokenizer must have tokens; got {folder}, whose tokenizer has none. Save the "
            "tokenizer that the model was trained with."
        )
    if len(tokenizer) > config.vocab_size:
        raise ModelFolderError(
            "the tokenizer must fit the model's vocabulary; got a tokenizer of "
            f"{len(tokenizer)} tokens and a vocabulary of {config.vocab_size}. Save the tokenizer "
            "that the model was trained with."
        )
    return tokenizer


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def load_model(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype | None, mesh: spmd.Mesh | None
) -> Model:
    """The model in evaluation mode on device `xla`, laid out over the mesh.

    It is recorded, split, and only then read, each device's shards by themselves. Waits for them.

    Args:
        folder: with safetensors, or, of a Llama, with checkpoints, of which the newest is taken.
        config: of the folder.
        dtype: of the parameters; None: the one that the configuration names.
        mesh: with the axis `tensor`; None for one device.

    Raises:
        spmd.errors.DataError, spmd.errors.CheckpointError: the files are damaged, or those of
            another model.
    """
    with torch.device("xla"):
        model: Model = (
            gpt2.build(config)
            if isinstance(config, GPT2Config)
            else LlamaForCausalLM._from_config(config, attn_implementation=CAUSAL_SDPA)
        )
    model = model.eval().requires_grad_(False).to(dtype or config.dtype or torch.float32)
    if (folder / GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if isinstance(model, GPT2LMHeadModel):
        if mesh is not None:
            gpt2.lay_out(model, mesh)
        gpt2.load(model, folder)
        return model
    if mesh is not None:
        # Logits stay split by vocabulary, until the program gathers those of the last tokens.
        shardings.parallelize(model, mesh, sequence_parallel=False, loss_parallel=True)
    weights.load(model, folder)
    return model


def end_tokens(model: Model) -> Sequence[int]:
    """The tokens that end a text, as the folder says."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    return [ids] if isinstance(ids, int) else list(ids or ())
