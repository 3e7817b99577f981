"""Trains GPT-2 on real text: single-device PyTorch, plus a mesh and a few sharding marks.

    python -m examples.gpt2.train --smoke
        a few steps on one device, in seconds
    python -m examples.gpt2.train --smoke --devices 8 --mesh fsdp=4,tensor=2
        the same on eight emulated devices
    python -m examples.gpt2.train --preset 124M --mesh fsdp=8 --dtype bf16
        on a machine with eight accelerators
    python -m examples.gpt2.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce
    python -m examples.gpt2.train --smoke --devices 8 --compare
        every strategy in turn, with a table and a plot

Legend: B batch, T sequence, V vocabulary.
"""

import argparse
import contextlib
import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.model import build_model
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.gpt2.text import (
    DEFAULT_CACHE_DIR,
    PYTHON_STDLIB,
    BlockBatches,
    TextData,
    TextError,
    load_text,
)
from examples.training.compare import CompareError, Variant, compare
from examples.training.log import Report, RunLog
from examples.training.meter import Meter
from examples.training.mfu import ModelSize, flops_per_token, known_peak, measured_peak
from examples.training.remat import POLICIES, recompute
from examples.training.timing import StopOnInterrupt
from spmd_data import MpDeviceLoader

DEVICE_INIT_ABOVE = 400_000_000  # parameters; larger models are not built on the host first
# Losses are read this many steps late, so that the device never waits for Python to send the next
# step.
READ_LAG = 2
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
COMPARED = Path("results/gpt2_strategies")


class KnobError(ValueError):
    """An option is out of range, or two options do not fit together."""


# --- Knobs ----------------------------------------------------------------------------------------


def knob(default: Any, text: str, **argument: Any) -> Any:
    """A field of `TrainConfig`, with the text that --help prints."""
    return dataclasses.field(
        default=default, metadata={"help": text, "type": type(default), **argument}
    )


@dataclass(frozen=True)
class TrainConfig:
    """All options of a run; `--help` prints a line for each."""

    preset: str = knob(
        "124M", "model size", choices=sorted(PRESETS, key=lambda name: PRESETS[name].num_params())
    )
    mesh: str = knob(
        "",
        "device mesh with axes among data, fsdp and tensor, as in data=2,fsdp=4; empty: one device",
    )
    strategy: str = knob(
        "spmd",
        "spmd: marks alone, any mesh; fsdp: each block gathers its parameters (fully_shard), mesh "
        "axes fsdp and data; ddp: replicated parameters, mesh axis data",
        choices=tuple(shardings.STRATEGIES),
    )
    devices: int = knob(0, "number of emulated CPU devices; 0: the real ones")
    device: str = knob(
        "xla", "xla, or cpu for eager torch without any sharding", choices=("xla", "cpu")
    )
    dtype: str = knob(
        "fp32",
        "bf16 computes matrices in bfloat16 under autocast; parameters stay in float32",
        choices=("fp32", "bf16"),
    )
    init: str = knob(
        "auto",
        "where weights are drawn; auto: on the host up to 350M (a seed gives the same weights on "
        "every mesh), on the device above",
        choices=("auto", "host", "device"),
    )
    steps: int = knob(200, "optimizer steps")
    batch: int = knob(0, "sequences in a step, over all devices; 0: the preset's")
    seq: int = knob(0, "tokens in a sequence; 0: the preset's")
    lr: float = knob(0.0, "peak learning rate; 0: the preset's")
    warmup: int = knob(20, "steps of linear warm-up")
    min_lr: float = knob(
        -1.0, "learning rate at the end of the cosine decay; negative: a tenth of the peak"
    )
    weight_decay: float = knob(
        0.1, "weight decay of matrices and tables; biases and layer norms have none"
    )
    clip: float = knob(1.0, "clip gradients to this norm; 0: no clipping")
    remat: str = knob(
        "none",
        "what a block computes again in backward instead of keeping it; none; full: everything; "
        "products: all but matrix products; attention: all but attention",
        choices=("none", *POLICIES),
    )
    dropout: float = knob(0.0, "probability of dropping an embedding, attention weight or residual")
    seed: int = knob(0, "seed of the weights, the order of the batches and dropout")
    data: Sequence[str] = knob(
        (PYTHON_STDLIB,),
        "files, folders, a hub dataset (name or name:configuration), or python-stdlib",
        type=str,
        nargs="+",
    )
    max_mb: float = knob(0.0, "how much of the text to use, in millions of bytes; 0: all")
    vocab: int = knob(0, "tokens of the BPE vocabulary; 0: the preset's")
    pad_vocab: int = knob(
        128, "round the model's vocabulary up to a multiple of this; 1: no padding"
    )
    cache_dir: str = knob(DEFAULT_CACHE_DIR, "folder for tokenizers and tokens")
    eval_every: int = knob(100, "steps between evaluations; 0: one at the end")
    eval_batches: int = knob(8, "batches in an evaluation; 0: no evaluations")
    log_every: int = knob(10, "steps between log lines")
    log_dir: str = knob(
        "", "folder for TensorBoard, metrics.jsonl and report.json; empty: no files"
    )
    results: str = knob("", "file for the report as JSON; empty: none")
    progress: bool = knob(True, "progress bar", action=argparse.BooleanOptionalAction)


SMOKE: dict[str, Any] = {
    "preset": "smoke",
    "steps": 12,
    "warmup": 2,
    "max_mb": 0.5,
    "eval_every": 6,
    "eval_batches": 2,
    "log_every": 1,
}


def run(config: TrainConfig) -> Report:
    """One training run, from text to report.

    Raises:
        KnobError, TextError, spmd.MeshError: the options, the text or the mesh cannot work; raised
            before the model is built.
    """
    config = with_defaults(config)
    preset = PRESETS[config.preset]
    on_xla = config.device == "xla"

    # --- Mesh -------------------------------------------------------------------------------------
    if on_xla:
        if config.devices:
            spmd.simulate(config.devices)
        spmd.use_spmd()
    mesh = parsed_mesh(config)
    device = spmd.device() if on_xla else torch.device("cpu")
    axes = {str(name): size for name, size in mesh.shape().items()} if mesh else {}
    num_devices = mesh.size() if mesh else 1

    # --- Data: before the model, so that a wrong path fails within seconds ------------------------
    text = load_text(
        config.data,
        vocab_size=config.vocab,
        seq=config.seq,
        max_mb=config.max_mb,
        cache_dir=config.cache_dir,
    )
    check_amount(config, text)
    train_batches = BlockBatches(text.train_NT, config.batch, config.steps, seed=config.seed)
    eval_batches = BlockBatches(text.validation_NT, config.batch, config.eval_batches)

    # --- Model: single-device code ----------------------------------------------------------------
    torch.manual_seed(config.seed)
    vocab_size = padded_vocab(config.vocab, config.pad_vocab)
    num_params = preset.num_params(vocab_size)
    inits_on_device = config.init == "device" or (
        config.init == "auto" and num_params > DEVICE_INIT_ABOVE
    )
    with device if inits_on_device else torch.device("cpu"):
        model = build_model(preset, vocab_size=vocab_size, dropout=config.dropout)
    model.to(device)

    # Before the shardings: parameters are then gathered for each of a block's two runs.
    recompute(model.transformer.h, config.remat)

    # --- Shardings: everything that many devices need ---------------------------------------------
    input_sharding = None
    if mesh:
        shardings.parallelize(model, mesh, config.strategy)
        input_sharding = shardings.batch_sharding(mesh)
    if inits_on_device and on_xla:
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), foreach=True)
    floor = config.min_lr / config.lr
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_factor(step, steps=config.steps, warmup=config.warmup, floor=floor),
    )

    # --- Loop -------------------------------------------------------------------------------------
    kind = device_kind(device)
    peak = known_peak(kind) or measured_peak(
        device, mesh, torch.bfloat16 if config.dtype == "bf16" else torch.float32
    )
    run_log = RunLog(log_dir=config.log_dir, num_steps=config.steps, shows_progress=config.progress)
    run_log.settings(dataclasses.asdict(config))
    run_log.say(f"text   {text.summary}")
    run_log.say(
        f"model  GPT-2 {preset.name}, {num_params:,} parameters, "
        f"on {num_devices} {config.device} device(s) {axes or ''}"
    )
    report = Report(
        config=dataclasses.asdict(config),
        num_params=num_params,
        num_devices=num_devices,
        device_kind=kind,
        mesh=axes,
        peak_flops=peak.flops_per_s,
        peak_source=peak.source,
    )
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq)
    meter = Meter(
        report,
        items_per_step=config.batch * config.seq,
        unit="tokens",
        flops_per_item=flops_per_token(size),
        run_log=run_log,
        on_xla=on_xla,
    )
    start = time.perf_counter()

    with (
        contextlib.closing(run_log),
        StopOnInterrupt() as interrupt,
        MpDeviceLoader(train_batches, device, input_sharding=input_sharding) as batches,
    ):
        # On the XLA device, the loader's next batch first sends the previous step to the device.
        for step, (x_BT, y_BT) in enumerate(batches, start=1):
            with autocast:
                loss = next_token_loss(model, x_BT, y_BT)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            # Here and not before the backward: gradients that outlive their step would take memory.
            optimizer.zero_grad()

            meter.add(step, loss.detach(), grad_norm, lr)
            if config.eval_batches and (
                step == config.steps or (config.eval_every and step % config.eval_every == 0)
            ):
                if on_xla:
                    spmd.sync()  # ends the step: the evaluation is a program of its own
                meter.read(up_to=step)
                eval_loss = evaluate(
                    model,
                    MpDeviceLoader(eval_batches, device, input_sharding=input_sharding),
                    autocast,
                )
                meter.evaluated(step, loss=eval_loss, perplexity=perplexity(eval_loss))
            elif step % config.log_every == 0:
                meter.read(up_to=step - READ_LAG if on_xla else step)
            if interrupt.requested:
                run_log.say(f"interrupted: ending after step {step} of {config.steps}")
                break
        if on_xla:
            spmd.sync()
        meter.read(up_to=config.steps)
        report = meter.finished(wall_s=time.perf_counter() - start, interrupted=interrupt.requested)
        run_log.finish(report)
    if config.results:
        report.write(config.results)
    return report


def next_token_loss(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the tokens of a batch: a float32 scalar on the batch's device."""
    logits_BTV = model(x_BT).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), y_BT.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: MpDeviceLoader, autocast: torch.autocast) -> float:
    """Mean loss over the batches, without dropout. Waits for the device."""
    model.eval()
    losses = []
    for x_BT, y_BT in batches:
        with autocast:
            losses.append(next_token_loss(model, x_BT, y_BT))
    model.train()
    return sum(loss.item() for loss in losses) / len(losses)


def perplexity(loss: float) -> float:
    """`exp(loss)`, or infinity where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def lr_factor(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """The learning rate at a step, counted from 0, as a fraction of the peak.

    It rises linearly over `warmup` steps, then falls along a cosine to `floor`.

    Example:
        >>> [round(lr_factor(step, steps=6, warmup=2, floor=0.1), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def device_kind(device: torch.device) -> str:
    """The runtime's name for the kind of the device: "cpu", "TPU v4", "NVIDIA H200"."""
    return str(spmd.device_attributes()[0]["kind"]) if device.type == "xla" else device.type


# --- Checks of the options, and the command line --------------------------------------------------


def with_defaults(config: TrainConfig) -> TrainConfig:
    """The configuration with the preset's values for options left open, after checking all options.

    The checks need no device and no text.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    preset = PRESETS[config.preset]
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
    for name in ("steps", "batch", "seq", "pad_vocab", "log_every"):
        if getattr(config, name) < 1:
            raise KnobError(
                f"--{name.replace('_', '-')} must be at least 1; got {getattr(config, name)}. "
                "Leave it out for the default."
            )
    if config.seq > preset.positions:
        raise KnobError(
            f"--seq must not pass the preset's position table; got {config.seq} for {preset.name} "
            f"with {preset.positions} positions. Shorten it."
        )
    if config.device == "cpu" and (config.mesh or config.devices):
        raise KnobError(
            f"a mesh needs the xla device; got --device cpu with --mesh {config.mesh!r} and "
            f"--devices {config.devices}. Leave out --device cpu."
        )
    if config.strategy != "spmd" and not config.mesh:
        raise KnobError(
            f"--strategy {config.strategy} splits the batch over a mesh; got none. Add for "
            f"instance --mesh {'data' if config.strategy == 'ddp' else 'fsdp'}=8."
        )
    if config.devices > 1 and not config.mesh:
        raise KnobError(
            f"without a mesh one device computes; got --devices {config.devices} and no --mesh. "
            f"Add for instance --mesh fsdp={config.devices}."
        )
    return config


def parsed_mesh(config: TrainConfig) -> spmd.Mesh | None:
    """The mesh, or None for one device.

    Raises:
        KnobError: the shardings do not know an axis, or the batch does not divide by its shards.
        spmd.MeshError: the text is not a mesh, or the mesh does not fit the devices.
    """
    if not config.mesh:
        return None
    mesh = spmd.parse_mesh(config.mesh, spmd.global_runtime_device_count())
    known = shardings.STRATEGIES[config.strategy]
    unknown = [axis for axis in mesh.shape() if axis not in known]
    if unknown:
        raise KnobError(
            f"with --strategy {config.strategy} mesh axes must be among {', '.join(known)}; got "
            f"{unknown} in {config.mesh!r}. Rename them, or take another strategy."
        )
    if config.strategy == "fsdp" and "fsdp" not in mesh.shape():
        raise KnobError(
            f"--strategy fsdp needs a mesh axis fsdp, which splits the parameters; got "
            f"{config.mesh!r}. Pass for instance --mesh fsdp={mesh.size()}."
        )
    num_shards = shardings.num_batch_shards(mesh)
    if config.batch % num_shards:
        raise KnobError(
            f"--batch must divide by data x fsdp; got {config.batch} for {num_shards}. "
            f"Pass for instance --batch {num_shards}."
        )
    return mesh


def check_amount(config: TrainConfig, text: TextData) -> None:
    """Raises KnobError if the text is too short for a training batch or for an evaluation."""
    needed = config.batch * (config.eval_batches or 1)
    if len(text.train_NT) < config.batch or (
        config.eval_batches and len(text.validation_NT) < needed
    ):
        raise KnobError(
            f"the text must fill one training batch of {config.batch} blocks and "
            f"{config.eval_batches} validation batches ({needed} blocks); got {len(text.train_NT)} "
            f"and {len(text.validation_NT)} of {config.seq} tokens. Give more text, or lower "
            "--batch, --seq or --eval-batches."
        )


def config_from(argv: Sequence[str] | None) -> TrainConfig:
    """The command line as a configuration; --smoke only changes defaults of other options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt2.train",
        description=(__doc__ or "").split("Legend")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(TrainConfig):
        options = {name: value for name, value in field.metadata.items() if value is not bool}
        shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        default = "" if field.default in (None, "") else f" (default: {shown})"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            **options | {"help": options["help"] + default},
        )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a run that takes seconds: "
        + ", ".join(f"{name}={value}" for name, value in SMOKE.items()),
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="runs every strategy, one after the other, and writes a table and a plot of losses, "
        f"memory and collectives into {COMPARED}",
    )
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**SMOKE)
    values = vars(parser.parse_args(argv))
    del values["smoke"], values["compare"]
    return TrainConfig(**values)


def compare_strategies(config: TrainConfig, argv: Sequence[str]) -> None:
    """Runs every strategy on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there is one device.
        CompareError: a run failed.
    """
    chosen = {"mesh": config.mesh, "results": config.results, "log-dir": config.log_dir}
    given = [f"--{name}" for name, value in chosen.items() if value]
    if given or config.strategy != "spmd" or config.device == "cpu":
        raise KnobError(
            "--compare chooses --mesh, --strategy, --results, --log-dir and --device itself; got "
            f"{', '.join(given) or 'another --strategy or --device'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    if num_devices < 2:
        raise KnobError(
            f"--compare needs at least two devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(f"{strategy} {mesh}", options(num_devices, "--strategy", strategy, "--mesh", mesh))
        for strategy, mesh in shardings.compared(num_devices)
    ]
    common = [argument for argument in argv if argument != "--compare"]
    compare("examples.gpt2.train", variants, common=common, folder=COMPARED)


def num_real_devices() -> int:
    """The number of devices, from a process that ends: the runs need the devices themselves."""
    script = "import spmd_core; print(spmd_core.global_runtime_device_count())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns the exit code: 0; 1 if a run of a comparison failed; 2 for options, text or a mesh that
    cannot work; 130 after Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = config_from(argv)
        if "--compare" in argv:
            compare_strategies(config, argv)
            return 0
        report = run(config)
    except (KnobError, TextError, spmd.MeshError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if report.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
