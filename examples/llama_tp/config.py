"""The options of a Llama run, what each means, and what they must satisfy together."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import spmd_core as spmd
from examples.llama_tp import shardings, weights
from examples.llama_tp.presets import PRESETS, ModelPreset
from examples.training.knobs import KnobError, check_at_least, knob, nearest_multiple, option
from examples.training.remat import POLICIES
from examples.training.text import DEFAULT_CACHE_DIR, PYTHON_STDLIB


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run; `--help` prints a line for each."""

    preset: str = knob(
        "125M",
        "model size, with defaults for --batch, --seq and --lr; not together with --weights",
        choices=sorted(PRESETS, key=lambda name: PRESETS[name].num_params()),
    )
    weights: str = knob(
        "",
        "folder of a Llama in Hugging Face's layout to start from: config.json, safetensors and "
        "tokenizer.json; sizes and vocabulary are its own; empty: random weights",
    )
    lora: int = knob(
        0, "rank of LoRA adapters (package peft), which alone are trained; 0: train all weights"
    )
    lora_alpha: float = knob(0.0, "LoRA's alpha; adapters count alpha / rank; 0: twice the rank")
    mesh: str = knob(
        "",
        "device mesh with axes among data, fsdp, context and tensor, as in data=2,tensor=4; empty: "
        "one device",
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
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones", resumable=True)
    device: str = knob(
        "xla",
        "xla, or cpu for eager torch without any sharding",
        choices=("xla", "cpu"),
        resumable=True,
    )
    dtype: str = knob(
        "fp32",
        "bf16 computes matrices in bfloat16 under autocast; parameters stay in float32",
        choices=("fp32", "bf16"),
    )
    init: str = knob(
        "auto",
        "where random weights are drawn; auto: on the host up to 125M (a seed gives the same "
        "weights on every mesh), on the device above",
        choices=("auto", "host", "device"),
        resumable=True,
    )
    steps: int = knob(200, "optimizer steps")
    batch: int = knob(0, "sequences in a step, over all devices; 0: the preset's")
    accumulate: int = knob(
        1, "parts of a batch that are computed one after the other; gradients are reduced once"
    )
    seq: int = knob(0, "tokens in a sequence; 0: the preset's")
    lr: float = knob(0.0, "peak learning rate; 0: the preset's")
    warmup: int = knob(20, "steps of linear warm-up")
    min_lr: float = knob(
        -1.0, "learning rate at the end of the cosine decay; negative: a tenth of the peak"
    )
    weight_decay: float = knob(0.1, "weight decay of matrices and tables; norms have none")
    clip: float = knob(1.0, "clip gradients to this norm; 0: no clipping")
    remat: str = knob(
        "none",
        "what a block computes again in backward instead of keeping it; none; full: everything; "
        "products: all but matrix products; attention: all but attention; offload: everything, "
        "from inputs that are kept in the memory of the host",
        choices=("none", *POLICIES),
        resumable=True,
    )
    seed: int = knob(0, "seed of the weights and of the order of the batches")
    data: Sequence[str] = knob(
        (PYTHON_STDLIB,),
        "files, folders, a hub dataset (name or name:configuration), or python-stdlib",
        type=str,
        nargs="+",
        resumable=True,
    )
    max_mb: float = knob(0.0, "how much of the text to use, in millions of bytes; 0: all")
    vocab: int = knob(0, "tokens of the BPE vocabulary; 0: the preset's")
    cache_dir: str = knob(DEFAULT_CACHE_DIR, "folder for tokenizers and tokens", resumable=True)
    checkpoint: str = knob(
        "",
        "file to save the run to, every --save-every steps, at the end and after Ctrl-C; {step} in "
        "its name keeps each; empty: none",
        resumable=True,
    )
    save_every: int = knob(0, "steps between two saves; 0: only at the end", resumable=True)
    resume: str = knob(
        "", "saved run to go on from, also on another mesh; empty: a new run", resumable=True
    )
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
    new_tokens: int = knob(32, "tokens of that continuation, each the likeliest", resumable=True)
    eval_every: int = knob(100, "steps between evaluations; 0: one at the end", resumable=True)
    eval_batches: int = knob(8, "batches in an evaluation; 0: no evaluations", resumable=True)
    log_every: int = knob(10, "steps between log lines", resumable=True)
    log_dir: str = knob(
        "",
        "folder for TensorBoard, metrics.jsonl and report.json; empty: no files",
        resumable=True,
    )
    results: str = knob("", "file for the report as JSON; empty: none", resumable=True)
    progress: bool = knob(
        True, "progress bar", action=argparse.BooleanOptionalAction, resumable=True
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


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with the preset's values for options left open, after checking all options.

    The checks need no device and no text.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    preset = sizes(config)
    if config.weights and config.vocab:
        raise KnobError(
            f"--weights brings its own vocabulary; got --vocab {config.vocab} too. Leave it out."
        )
    lr = config.lr or preset.lr
    config = dataclasses.replace(
        config,
        batch=config.batch or preset.batch,
        seq=config.seq or preset.seq,
        vocab=config.vocab or preset.vocab_size,
        lr=lr,
        min_lr=lr / 10 if config.min_lr < 0 else config.min_lr,
        data=tuple(config.data),
    )
    check_at_least(config, 1, ("steps", "batch", "accumulate", "seq", "log_every"))
    check_at_least(config, 1, ("new_tokens",))
    check_at_least(config, 0, ("devices", "save_every", "lora"))
    if config.adapters and not config.lora:
        raise KnobError(
            f"--adapters writes LoRA adapters; got {config.adapters!r} and no --lora. Add for "
            "instance --lora 8, or write all weights with --export."
        )
    if config.weights:
        weights.check(config.weights, seq=config.seq)
    for name in ("export", "adapters"):
        weights.check_target(option(name), getattr(config, name), config.weights)
    if config.save_every and not config.checkpoint:
        raise KnobError(
            f"--save-every saves to a file; got {config.save_every} and no --checkpoint. Add for "
            "instance --checkpoint run.pt."
        )
    if config.device == "cpu" and (config.mesh or config.devices):
        raise KnobError(
            f"a mesh needs the xla device; got --device cpu with --mesh {config.mesh!r} and "
            f"--devices {config.devices}. Leave out --device cpu."
        )
    if config.batch % config.accumulate:
        raise KnobError(
            f"--batch must divide by --accumulate; got {config.batch} and {config.accumulate}. "
            f"Pass for instance --batch {nearest_multiple(config.batch, config.accumulate)}."
        )
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh tensor={config.devices}."
        )
    return config


def sizes(config: TrainConfig) -> ModelPreset:
    """The model's sizes: the preset's, or those of the folder that --weights names.

    Raises:
        KnobError: the folder has no Llama.
    """
    preset = PRESETS[config.preset]
    return weights.sizes(config.weights, defaults=preset) if config.weights else preset


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: the shardings do not know an axis, or sizes do not divide by the axes that split
            them.
        spmd.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    parallel = [
        name
        for name in ("sequence_parallel", "loss_parallel")
        if getattr(config, name) and "tensor" not in config.mesh
    ]
    if parallel:
        raise KnobError(
            f"--{parallel[0].replace('_', '-')} splits over a mesh axis tensor; got --mesh "
            f"{config.mesh!r}. Add for instance tensor=4 to it."
        )
    if not config.mesh:
        return None
    mesh = spmd.parse_mesh(config.mesh, spmd.global_runtime_device_count())
    known = shardings.MESH_AXES
    unknown = [axis for axis in mesh.shape() if axis not in known]
    if unknown:
        raise KnobError(
            f"mesh axes must be among {', '.join(known)}; got {unknown} in {config.mesh!r}. "
            "Rename them."
        )
    num_parts = shardings.num_batch_shards(mesh) * config.accumulate
    if config.batch % num_parts:
        raise KnobError(
            f"--batch must divide by data x fsdp x --accumulate; got {config.batch} for "
            f"{num_parts}. Pass for instance --batch {nearest_multiple(config.batch, num_parts)}."
        )
    model = sizes(config)
    num_heads, by = model.num_heads, shardings.axis_size(mesh, "tensor")
    if num_heads % by:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise KnobError(
            f"the axis tensor splits attention by heads, whose number it must divide; got "
            f"tensor={by} for the {num_heads} heads of {model.name}. Pass one of tensor="
            f"{', '.join(map(str, fitting))}, or another model."
        )
    if config.sequence_parallel and config.seq % by:
        raise KnobError(
            f"with --sequence-parallel the axis tensor must divide --seq; got tensor={by} for "
            f"{config.seq} tokens. Pass for instance --seq {nearest_multiple(config.seq, by)}."
        )
    context = shardings.axis_size(mesh, "context")
    parts = 2 * context * (by if config.sequence_parallel else 1)
    if context > 1 and config.seq % parts:
        raise KnobError(
            "the axis context cuts --seq into two equal parts for each device, and "
            f"--sequence-parallel into more; got {config.seq} tokens for {parts} parts. Pass for "
            f"instance --seq {nearest_multiple(config.seq, parts)}."
        )
    return mesh
