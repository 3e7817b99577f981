"""GPT-2 for the server: what its folder must have, its layout, and its weights."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.training.attention import CAUSAL_SDPA

_COUNTS = ("n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions")
# Causal masks, which files of older releases of transformers have as tensors.
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


def wrong_size(config: Mapping[str, Any]) -> str | None:
    """What no served GPT-2 can have, as text; None if all is right.

    A size that is absent or null has the default of transformers.
    """
    for name in _COUNTS:
        value = config.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and not is_count:
            return f"{name} must be a whole number of at least 1; got {value!r}"
    width, heads = config.get("n_embd") or 768, config.get("n_head") or 12
    if width % heads:
        return f"n_head must divide n_embd; got {heads} for {width}"
    if config.get("add_cross_attention"):
        return "add_cross_attention must be false, as a prompt has nothing to attend to; got true"
    return None


def build(config: GPT2Config) -> GPT2LMHeadModel:
    """A model with random weights, on the current default device."""
    # With an id of padding, the model would read its input on the host to warn of a missing mask.
    config.pad_token_id = None
    return GPT2LMHeadModel._from_config(config, attn_implementation=CAUSAL_SDPA)


def lay_out(model: GPT2LMHeadModel, mesh: spmd.Mesh) -> None:
    """Marks the weights, and what enters and leaves the layers, over the axis `tensor`.

    The layers themselves get no hooks, so that they can run as one loop.
    """
    shardings.shard_parameters(model, mesh)
    for module, spec in (
        (model.transformer.drop, shardings.HIDDEN_BTD),
        (model.transformer.ln_f, shardings.HIDDEN_BTD),
        (model.lm_head, shardings.LOGITS_BTV),
    ):
        module.register_forward_hook(_marks(mesh, shardings.on_mesh(spec, mesh)))


def _marks(mesh: spmd.Mesh, spec: shardings.Spec) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        spmd.mark_sharding(output, mesh, spec)

    return hook


def load(model: GPT2LMHeadModel, folder: Path) -> None:
    """Gives a model the safetensors in a folder. Waits for the transfers.

    The names are those of `GPT2LMHeadModel`, or those of the model inside it, as in the files of
    the first GPT-2.

    Raises:
        spmd.errors.DataError: the files are damaged, or those of another model.
    """
    into = model.transformer if _names_the_inner_model(folder) else model
    keys = spmd.load_safetensors(into, folder, strict=False)
    others = [name for name in keys.unexpected_keys if not _MASK.fullmatch(name)]
    if keys.missing_keys or others:
        raise spmd.errors.DataError(
            f"the tensors in {str(folder)!r} must be those of a GPT-2; got "
            f"{len(keys.missing_keys)} missing ({', '.join(keys.missing_keys[:3])}) and "
            f"{len(others)} unexpected ({', '.join(others[:3])}). Save the model again."
        )


def _names_the_inner_model(folder: Path) -> bool:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if "wte.weight" in file.keys():  # noqa: SIM118 - the file is no dict
                return True
    return False
