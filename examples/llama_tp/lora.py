"""LoRA adapters by Hugging Face's peft: on a model, in its plan, and into files.

Source: Hu et al. 2021. Beside a frozen linear layer of weight W stand A, of shape (rank, in), and
B, of shape (out, rank); the layer computes W x + alpha / rank * B A x.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.training.knobs import KnobError
from examples.training.resume import SaveError

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add(model: LlamaForCausalLM, *, rank: int, alpha: float, seed: int) -> Any:
    """Puts adapters on the linear layers of all blocks, in place, and freezes all other parameters.

    The adapters are drawn on the host: a seed gives the same ones on every mesh.

    Args:
        model: a Llama on any device.
        rank: of the adapters; 0: none.
        alpha: their weight, times the rank; 0: twice the rank.
        seed: of A; B is 0.

    Returns:
        peft's model around `model`, which saves and merges the adapters; None without any.

    Raises:
        KnobError: peft is not installed.
    """
    if not rank:
        return None
    try:
        # Only for runs with adapters: the import takes a second.
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    except ImportError as error:
        raise KnobError(
            "--lora needs the package peft; got no such package. Run: pip install peft"
        ) from error
    config = LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, target_modules=list(ADAPTED), task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft asks the model for `is_gradient_checkpointing`; ends with a release that does not.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                drawn = torch.empty(parameter.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
    return adapted


def save(adapted: Any, folder: str) -> None:
    """Writes the adapters, for `peft.PeftModel.from_pretrained`.

    Waits for the device; under several processes, each must call it.

    Args:
        adapted: what `add` returned.
        folder: is made if it is missing.

    Raises:
        SaveError: a file could not be written.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - as in `add`

    state = spmd.to_cpu(get_peft_model_state_dict(adapted))
    try:
        if spmd.distributed.is_master():
            adapted.save_pretrained(Path(folder).expanduser(), state_dict=state)
    except OSError as error:
        raise SaveError(
            f"--adapters must be able to write; {folder!r} could not be written: {error}. "
            "Free space, or name another folder."
        ) from error
