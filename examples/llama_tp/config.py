"""The options of a Llama run, what each means, and what they must satisfy together.

Plain values: neither torch nor jax is imported, so that a wrong option is reported at once.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.llama_tp.presets import BATCH_AXES, MESH_AXES, PRESETS, ModelPreset
from examples.training.choices import (
    MOST_ROWS,
    MOST_TOKENS,
    PYTHON_STDLIB,
    REMAT_POLICIES,
    TEXT_CACHE_DIR,
)
from examples.training.knobs import (
    KnobError,
    add_smoke,
    knob,
    nearest_multiple,
    option,
    parse,
    parser_of,
)
from examples.training.mesh_sizes import Sizes, check_axes, check_heads, mesh_sizes
from examples.training.run_config import RunConfig, check_mesh_auto, check_run_config

# What options do for which --mesh auto has no place.
NOT_WITH_MESH_AUTO = {
    "sequence_parallel": "splits activations over the axis tensor",
    "loss_parallel": "splits the logits over the axis tensor",
}


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """All options of a run; `--help` prints a line for each."""

    preset: str = knob(
        "125M",
        "model size, with defaults for --batch, --seq and --lr; not together with --weights",
        choices=sorted(PRESETS, key=lambda name: PRESETS[name].num_params()),
    )
    weights: str = knob(
        "",
        "folder of a Llama to start from, in Hugging Face's layout (config.json, safetensors and "
        "tokenizer.json) or of a run's --checkpoint; sizes and vocabulary are its own; empty: "
        "random weights",
    )
    lora: int = knob(
        0,
        "rank of LoRA adapters (package peft), which alone are trained; 0: train all weights",
        most=2**16,
    )
    lora_alpha: float = knob(0.0, "LoRA's alpha; adapters count alpha / rank; 0: twice the rank")
    mesh: str = knob(
        "",
        "device mesh with axes among data, fsdp, context and tensor, as in data=2,tensor=4; auto: "
        "the mesh and the shardings are found for the first step; empty: one device",
        resumable=True,
    )
    sequence_parallel: bool = knob(
        False,
        "split activations between attention and MLP along the sequence, over mesh axis tensor",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    loss_parallel: bool = knob(
        False,
        "keep the logits split along the vocabulary, over mesh axis tensor",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    init: str = knob(
        "auto",
        "where random weights are drawn; auto: on the host up to 125M (a seed gives the same "
        "weights on every mesh), on the device above",
        choices=("auto", "host", "device"),
        resumable=True,
    )
    batch: int = knob(0, "sequences in a step, over all devices; 0: the preset's", most=MOST_ROWS)
    accumulate: int = knob(
        1,
        "parts of a batch that are computed one after the other; gradients are reduced once",
        least=1,
        most=MOST_ROWS,
    )
    seq: int = knob(0, "tokens in a sequence; 0: the preset's", most=MOST_TOKENS)
    min_lr: float = knob(
        -1.0,
        "learning rate at the end of the cosine decay; negative: a tenth of the peak",
        least=-math.inf,
    )
    weight_decay: float = knob(0.1, "weight decay of matrices and tables; norms have none")
    remat: str = knob(
        "none",
        "what a block computes again in backward instead of keeping it; none; full: everything; "
        "products: all but matrix products; attention: all but attention; offload: everything, "
        "from inputs that are kept in the memory of the host",
        choices=("none", *REMAT_POLICIES),
        resumable=True,
    )
    scan: bool = knob(
        False,
        "run the blocks as loops of the program: the square root of their number, at most 6, "
        "which compiles as fast as so many blocks",
        action=argparse.BooleanOptionalAction,
        resumable=True,
    )
    data: Sequence[str] = knob(
        (PYTHON_STDLIB,),
        "files, folders, a hub dataset (name or name:configuration), or python-stdlib",
        type=str,
        nargs="+",
        resumable=True,
    )
    max_mb: float = knob(0.0, "how much of the text to use, in millions of bytes; 0: all")
    vocab: int = knob(0, "tokens of the BPE vocabulary; 0: the preset's", most=MOST_TOKENS)
    cache_dir: str = knob(TEXT_CACHE_DIR, "folder for tokenizers and tokens", resumable=True)
    export: str = knob(
        "",
        "folder to write the trained model and its tokenizer to, for transformers; adapters are "
        "merged into it; empty: none",
        resumable=True,
    )
    adapters: str = knob(
        "", "folder to write the LoRA adapters to, for peft; empty: none", resumable=True
    )
    prompt: str = knob("", "text that the trained model continues; empty: none", resumable=True)
    new_tokens: int = knob(
        32,
        "tokens of that continuation, each the likeliest",
        resumable=True,
        least=1,
        most=MOST_TOKENS,
    )


SMOKE: dict[str, Any] = {
    "preset": "debug",
    "steps": 12,
    "warmup": 2,
    "max_mb": 0.5,
    "eval_every": 6,
    "eval_batches": 2,
    "log_every": 1,
}


def config_from(
    argv: Sequence[str] | None, *, usage: str | None = None, module: str = "examples.llama_tp.train"
) -> TrainConfig:
    """The command line as a configuration.

    Args:
        argv: without the program; None: this process's.
        module: the command, for --help.
        usage: stands on top of --help, up to its legend.

    Raises:
        KnobError: two options do not fit together.
    """
    parser = parser_of(TrainConfig, module=module, usage=usage)
    add_smoke(parser, SMOKE)
    config = parse(parser, TrainConfig, argv, smoke=SMOKE)
    given = sys.argv[1:] if argv is None else argv
    if config.weights and any(a.split("=")[0] == "--preset" for a in given):
        raise KnobError(
            f"--weights brings the sizes of the model; got --preset {config.preset} too. "
            "Leave one of them out."
        )
    return config


def check_options(config: TrainConfig) -> None:
    """Checks what needs neither a model's folder, nor a device, nor the text.

    An option that is left open has its preset's value, or 0.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    check_run_config(config, axis="tensor")
    check_mesh_auto(config, NOT_WITH_MESH_AUTO, example="tensor")
    if config.weights and config.vocab:
        raise KnobError(
            f"--weights brings its own vocabulary; got --vocab {config.vocab} too. Leave it out."
        )
    if config.adapters and not config.lora:
        raise KnobError(
            f"--adapters writes LoRA adapters; got {config.adapters!r} and no --lora. Add for "
            "instance --lora 8, or write all weights with --export."
        )
    if config.named_mesh:
        sizes = mesh_sizes(config.mesh, num_emulated=config.devices, example="tensor")
        if config.weights:  # whose folder is not read here
            sizes = dict.fromkeys(sizes)
        preset = PRESETS[config.preset]
        given = dataclasses.replace(
            config, batch=config.batch or preset.batch, seq=config.seq or preset.seq
        )
        check_mesh(given, sizes, preset)


def check_mesh(config: TrainConfig, sizes: Sizes, model: ModelPreset) -> None:
    """Checks that a mesh fits the plan, the batch, the sequences and the model.

    Args:
        config: with the preset's values for options left open.
        sizes: of the mesh's axes; with one that is not known, the axes' names alone are checked.
        model: the model's sizes.

    Raises:
        KnobError: the shardings do not know an axis, or what the mesh splits does not divide by it.
    """
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(config, name) and "tensor" not in sizes:
            raise KnobError(
                f"{option(name)} splits over a mesh axis tensor; got --mesh {config.mesh!r}. Add "
                "for instance tensor=4 to it."
            )
    check_axes(config.mesh, sizes, MESH_AXES)
    if None in sizes.values():
        return
    num_parts = config.accumulate * math.prod(sizes.get(axis) or 1 for axis in BATCH_AXES)
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by data x fsdp x --accumulate; got {config.batch} for "
            f"{num_parts}. Pass for instance --batch {nearest_multiple(config.batch, num_parts)}."
        )
    by, context = sizes.get("tensor") or 1, sizes.get("context") or 1
    check_heads(by, model.num_heads, of=model.name, other="another model")
    if config.sequence_parallel and config.seq % by:
        raise KnobError(
            f"with --sequence-parallel the axis tensor must divide --seq; got tensor={by} for "
            f"{config.seq} tokens. Pass for instance --seq {nearest_multiple(config.seq, by)}."
        )
    parts = 2 * context * (by if config.sequence_parallel else 1)
    if context > 1 and config.seq % parts:
        raise KnobError(
            "the axis context cuts --seq into two equal parts for each device, and "
            f"--sequence-parallel into more; got {config.seq} tokens for {parts} parts. Pass for "
            f"instance --seq {nearest_multiple(config.seq, parts)}."
        )
