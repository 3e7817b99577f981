"""LoRA adapters by Hugging Face's peft: on a model, into files, and merged from checkpoints.

Source: Hu et al. 2021. Beside a frozen linear layer of weight W stand A, of shape (rank, in), and
B, of shape (out, rank); the layer computes W x + alpha / rank * B A x.
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.training.knobs import KnobError
from examples.training.resume import SaveError

CONFIG = "adapter_config.json"  # peft's name
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


# --- A run's checkpoints --------------------------------------------------------------------------


def describe(adapted: Any, folder: str) -> None:
    """Writes beside a run's checkpoints what its adapters are, as peft does.

    Process 0 writes, and none waits for it.

    Args:
        adapted: what `add` returned.
        folder: is there.

    Raises:
        SaveError: the file could not be written.
    """
    if not spmd.distributed.is_master():
        return
    try:
        adapted.peft_config["default"].save_pretrained(Path(folder).expanduser())
    except OSError as error:
        raise SaveError(
            f"--checkpoint must be able to write {CONFIG}; {folder!r} could not be written: "
            f"{error}. Free space, or name another folder."
        ) from error


def load_merged(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Gives a model without adapters the weights of a run with them: W + alpha / rank * B A.

    Waits for the transfers. The sum is taken in float32 and rounded once to the dtype of W; W was
    rounded to it before.

    Args:
        tensors: the model's, by the names that it has without adapters.
        folder: of the run's checkpoints, of which the newest is taken; has peft's configuration.

    Raises:
        spmd.errors.CheckpointError: the files are damaged, or those of another model.
    """
    from spmd_core.checkpoint import load_checkpoint  # noqa: PLC0415 - an optional package

    rank, scale = _rank_and_scale(folder)
    state: dict[str, Tensor] = {}
    merged: list[tuple[Tensor, Tensor, Tensor]] = []
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module.rpartition(".")[2] not in ADAPTED:
            state[name] = tensor
            continue
        state[f"{module}.base_layer.{leaf}"] = tensor
        if leaf == "weight":
            a, b = (
                torch.empty(shape, dtype=torch.float32, device=tensor.device)
                for shape in ((rank, tensor.shape[1]), (tensor.shape[0], rank))
            )
            state[f"{module}.lora_A.default.weight"] = a
            state[f"{module}.lora_B.default.weight"] = b
            merged.append((tensor, a, b))
    load_checkpoint(folder, {"model": state}, convert=True)
    with torch.no_grad():
        for tensor, a, b in merged:
            tensor.copy_(tensor.float() + b @ a * scale)
    if merged and merged[0][0].device.type == "xla":
        spmd.sync()  # in a program of its own; the adapters' memory is free behind it


def _rank_and_scale(folder: Path) -> tuple[int, float]:
    try:
        found = json.loads((folder / CONFIG).read_text())
        return int(found["r"]), float(found["lora_alpha"]) / int(found["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise spmd.errors.CheckpointError(
            f"beside the checkpoints of a run with --lora, {CONFIG} has r and lora_alpha; that in "
            f"{folder} cannot be read: {error!r}. Start the run again: it writes the file."
        ) from error
