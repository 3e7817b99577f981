"""A Llama in a folder, of Hugging Face's files or of a run's checkpoints: from it, and into it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import spmd_core as spmd
from examples.llama_tp import lora
from examples.llama_tp.folder_sizes import wrong_size
from examples.llama_tp.presets import ModelPreset
from examples.training.attention import CAUSAL_SDPA
from examples.training.knobs import KnobError
from examples.training.resume import SaveError
from examples.training.text import END_OF_TEXT, GivenTokenizer, TextData
from spmd_core import files

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# What else may belong to a tokenizer; copied as it is.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "tokenizer.model"),
)


# --- From a folder --------------------------------------------------------------------------------


def sizes(folder: str, *, defaults: ModelPreset) -> ModelPreset:
    """The sizes in a folder's config.json; batch and learning rate of `defaults`.

    Raises:
        KnobError: the folder has no Llama.
    """
    config = model_config(folder)
    return ModelPreset(
        name=Path(folder).expanduser().resolve().name,
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        hidden=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        seq=min(defaults.seq, config.max_position_embeddings),
        batch=defaults.batch,
        lr=defaults.lr,
    )


def model_config(folder: str) -> LlamaConfig:
    """The model's configuration, with the attention and without the cache that training needs.

    Raises:
        KnobError: the folder has no config.json of a Llama.
    """
    path = Path(folder).expanduser() / CONFIG
    try:
        found = json.loads(path.read_text())
        kind = found.get("model_type")
        wrong = wrong_size(found)
        if wrong is not None:
            raise ValueError(wrong)
        if kind == "llama" and "quantization_config" not in found:
            config = LlamaConfig.from_dict(found)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise KnobError(
            f"--weights names a folder with {CONFIG}, safetensors and {TOKENIZER}; {str(path)!r} "
            f"cannot be read: {error}. Name the folder of a downloaded or exported model."
        ) from error
    if kind != "llama" or "quantization_config" in found:
        got = f"model_type {kind!r}" if kind != "llama" else "quantized weights"
        raise KnobError(
            f"--weights takes a Llama with plain weights; got {got} in {str(path)!r}. "
            "Name another model."
        )
    config.use_cache = False
    config._attn_implementation = CAUSAL_SDPA
    return config


def check(folder: str, *, seq: int) -> None:
    """Checks in no time that a folder has all that a run with sequences of `seq` tokens needs.

    Raises:
        KnobError: a file is missing, or the model is meant for shorter sequences.
    """
    path, positions = Path(folder).expanduser(), model_config(folder).max_position_embeddings
    missing = [] if (path / TOKENIZER).exists() else [TOKENIZER]
    if not any((path / name).exists() for name in WEIGHTS) and not has_steps(path):
        missing.insert(0, WEIGHTS[0])
    if missing:
        raise KnobError(
            f"--weights names a folder with {CONFIG}, safetensors and {TOKENIZER}, or that of a "
            f"run's --checkpoint; got {folder!r} without {' and '.join(missing)}. Convert what is "
            "there with transformers' save_pretrained."
        )
    if seq > positions:
        raise KnobError(
            f"--seq may not exceed the positions that the model is meant for; got {seq}, and "
            f"{positions} in {folder!r}. Pass --seq {positions} or less."
        )


def has_steps(folder: Path) -> bool:
    """Whether a folder has checkpoints of a run."""
    if not any(name.name.isdecimal() for name in folder.iterdir()):
        return False
    from spmd_core.checkpoint import folder as steps  # noqa: PLC0415 - an optional package

    return bool(steps.whole_steps(folder))


def load(model: LlamaForCausalLM | Mapping[str, Tensor], folder: str | Path) -> None:
    """Gives a model, or its tensors by name, the weights in a folder. Waits for the transfers.

    Each process reads what its devices hold, into the tensors' dtypes; of checkpoints, the newest.
    The adapters of a run with --lora are merged.

    Raises:
        spmd.errors.DataError, spmd.errors.CheckpointError: the files are damaged, or those of
            another model.
    """
    path = Path(folder).expanduser()
    if any(path.glob("*.safetensors")):
        spmd.load_safetensors(model, path)
        return
    if (path / lora.CONFIG).exists():
        if isinstance(model, LlamaForCausalLM):
            model = model.state_dict(keep_vars=True)
        lora.load_merged(model, path)
        return
    from spmd_core.checkpoint import load_checkpoint  # noqa: PLC0415 - an optional package

    load_checkpoint(path, {"model": model}, convert=True)


def tokenizer(folder: str) -> GivenTokenizer:
    """The folder's tokenizer, without the special tokens that it puts around a text.

    The token that begins a text (the config's `bos_token_id`), or else the one that ends it, stands
    before every document.

    Raises:
        KnobError: it cannot be read, or it has more tokens than the model's table has rows.
    """
    path, config = Path(folder).expanduser() / TOKENIZER, model_config(folder)
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise KnobError(
            f"--weights needs a tokenizer that the library tokenizers reads; {str(path)!r} cannot "
            f"be read: {error}. Save it with transformers' save_pretrained."
        ) from error
    found.no_truncation()
    found.no_padding()
    ids = found.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise KnobError(
            f"--weights needs a tokenizer with tokens; {str(path)!r} has none. Save the model's "
            "own with transformers' save_pretrained."
        )
    num_tokens = max(ids) + 1
    if num_tokens > config.vocab_size:
        raise KnobError(
            "each token needs a row in the model's table; got a tokenizer of "
            f"{num_tokens} tokens and a table of {config.vocab_size} rows in {folder!r}. "
            "Name the folder of a model with its own tokenizer."
        )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    separator = next((i for i in (config.bos_token_id, *ends) if i is not None), None)
    if separator is None:
        raise KnobError(
            "documents are separated by the token that begins or ends a text; got neither "
            f"bos_token_id nor eos_token_id in {folder!r}. Add one to its {CONFIG}."
        )
    return GivenTokenizer(found, separator)


# --- Into a folder --------------------------------------------------------------------------------


def check_target(option: str, target: str, source: str) -> None:
    """Checks that a folder to write to is none that is read, and no file.

    Raises:
        KnobError: it is.
    """
    path = Path(target).expanduser()
    if target and path.exists() and not path.is_dir():
        raise KnobError(f"{option} names a folder; got {target!r}, a file. Name another.")
    if target and source and path.resolve() == Path(source).expanduser().resolve():
        raise KnobError(
            f"{option} writes to another folder than --weights reads; got {target!r} for both. "
            "Name another."
        )


def export(model: LlamaForCausalLM, text: TextData, folder: str, *, source: str) -> None:
    """Writes a model and its tokenizer, for transformers on any machine.

    Waits for the device; under several processes, each must call it.

    Args:
        model: on any device.
        text: has the tokenizer of a model that began with random weights.
        folder: is made if it is missing.
        source: the folder that the model began with, whose tokenizer is copied; or empty.

    Raises:
        SaveError: a file could not be written.
    """
    try:
        spmd.save_safetensors(model, Path(folder).expanduser())
    except OSError as error:
        raise _unwritten("--export", folder, error) from error
    describe(model, text, folder, source=source, option="--export")


def describe(
    model: LlamaForCausalLM, text: TextData, folder: str, *, source: str, option: str
) -> None:
    """Writes what a folder needs beside the weights: the sizes and the tokenizer.

    Process 0 writes, and none waits for it.

    Args:
        model: on any device.
        text, source: see `export`.
        folder: is there.
        option: names it.

    Raises:
        SaveError: a file could not be written.
    """
    if not spmd.distributed.is_master():
        return
    target = Path(folder).expanduser()
    try:
        _write_config(model, target)
        if source:
            for name in TOKENIZER_FILES:
                if (found := Path(source).expanduser() / name).exists():
                    shutil.copyfile(found, target / name)
        else:
            PreTrainedTokenizerFast(
                tokenizer_object=text.tokenizer,
                bos_token=END_OF_TEXT,
                eos_token=END_OF_TEXT,
                model_max_length=model.config.max_position_embeddings,
                clean_up_tokenization_spaces=False,
            ).save_pretrained(target)
    except OSError as error:
        raise _unwritten(option, folder, error) from error


def _unwritten(option: str, folder: str, error: OSError) -> SaveError:
    return SaveError(
        f"{option} must be able to write the model; {folder!r} has no complete one: {error}"
    )


def _write_config(model: LlamaForCausalLM, target: Path) -> None:
    values: dict[str, Any] = model.config.to_diff_dict() | {
        "architectures": [type(model).__name__],
        "dtype": str(model.dtype).removeprefix("torch."),
        "use_cache": True,
    }
    files.write_text(target / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(target)
