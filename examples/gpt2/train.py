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

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence, V vocabulary.
"""

from examples.gpt2.config import config_from, with_defaults
from examples.training.knobs import check_command_line

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    check_command_line(lambda: with_defaults(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt2 import data, shardings
from examples.gpt2.config import COMPARED, TrainConfig, check_resumable
from examples.gpt2.model import build_model
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.gpt2.resolve import num_microbatches, parsed_mesh
from examples.training import resume
from examples.training.collector import long_lived
from examples.training.command import exit_code, num_real_devices, start_devices
from examples.training.compare import Variant, compare
from examples.training.host_values import on_host
from examples.training.knobs import KnobError
from examples.training.log import Report, RunLog
from examples.training.meter import Meter
from examples.training.remat import recompute
from examples.training.resume import SaveError
from examples.training.schedule import lr_factor
from examples.training.text import TextError
from examples.training.timing import StopOnInterrupt
from spmd_core.metrics import ModelSize, device_kind, device_peak, flops_per_token
from spmd_data import MpDeviceLoader
from spmd_data.packing import NO_TARGET

DEVICE_INIT_ABOVE = 400_000_000  # parameters; larger models are not built on the host first
# Losses are read this many steps late, so that the device never waits for Python to send the next
# step.
READ_LAG = 2


def run(config: TrainConfig) -> Report:
    """One training run, from text to report.

    Raises:
        KnobError, TextError, ResumeError, spmd.MeshError: the options, the text, the saved run or
            the mesh cannot work; raised before the model is built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    preset = PRESETS[config.preset]
    on_xla = config.device == "xla"
    saved = resume.read(config) if config.resume else None
    if saved:
        check_resumable(config, saved["config"])

    # --- Mesh -------------------------------------------------------------------------------------
    if on_xla:
        start_devices(config.devices)
    mesh = parsed_mesh(config)
    device = spmd.device() if on_xla else torch.device("cpu")
    axes = {str(name): size for name, size in mesh.shape().items()} if mesh else {}
    num_devices = mesh.size() if mesh else 1
    resume.check_writable(
        {
            "--checkpoint": config.checkpoint.replace("{step}", "0"),
            "--results": config.results,
        }
    )

    # --- Data: before the model, so that a wrong path fails within seconds ------------------------
    text = data.load(config)
    packed = data.pack(text, config) if config.pack else None
    identity = packed.identity if packed else text.identity

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
    stages = None
    if mesh:
        if config.strategy == "pipeline":
            stages = shardings.pipeline(
                model,
                mesh,
                num_microbatches=num_microbatches(config, mesh),
                schedule=config.schedule,
                rounds=config.rounds if config.schedule == "circular" else 1,
            )
        else:
            shardings.parallelize(model, mesh, config.strategy)
        input_sharding = shardings.batch_sharding(mesh, minibatch=config.pack)
    if inits_on_device and on_xla:
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    # By the model's own dims: a pipeline's parameters have a dim of stages in front.
    num_dims = {p: p.ndim - getattr(p, "num_stacked_dims", 0) for p in model.parameters()}
    decayed = [p for p, dims in num_dims.items() if dims >= 2]
    others = [p for p, dims in num_dims.items() if dims < 2]
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

    # --- Where the run begins ---------------------------------------------------------------------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if packed:
        train_batches, eval_batches = data.packed_batches(packed, config, mesh)
        batches = MpDeviceLoader(train_batches, device, input_sharding=input_sharding)
        parts["data"] = batches  # which knows the run's place in the data
        first = resume.restore(saved, data=identity, parts=parts) if saved else 0
    else:
        first = resume.restore(saved, data=identity, parts=parts) if saved else 0
        train_batches, eval_batches = data.batches(text, config, first=first)
        batches = MpDeviceLoader(train_batches, device, input_sharding=input_sharding)

    def save(step: int) -> None:
        if on_xla:
            spmd.sync()  # ends the step: its program is the same as that of a step without a save
        if spmd.is_planning():
            return
        path = config.checkpoint.replace("{step}", str(step))
        resume.save(path, step=step, config=config, data=identity, parts=parts)
        run_log.say(f"step {step:5d}  saved to {path}")

    # --- Loop -------------------------------------------------------------------------------------
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    peak = device_peak(device, mesh, dtype=dtype)
    run_log = RunLog(
        log_dir=config.log_dir,
        num_steps=config.steps,
        first_step=first,
        shows_progress=config.progress,
    )
    run_log.settings(dataclasses.asdict(config))
    if mesh:
        run_log.mesh(mesh)
    run_log.say(f"text   {packed.summary if packed else text.summary}")
    run_log.say(
        f"model  GPT-2 {preset.name}, {num_params:,} parameters, "
        f"on {num_devices} {config.device} device(s) {axes or ''}"
    )
    if config.resume:
        run_log.say(resume.said(config, saved, lr=scheduler.get_last_lr()[0]))
    report = Report(
        config=dataclasses.asdict(config),
        num_params=num_params,
        num_devices=num_devices,
        device_kind=device_kind(device),
        mesh=axes,
        resumed_at=first,
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
        log_every=config.log_every,
        lag=READ_LAG if on_xla else 0,
        on_xla=on_xla,
    )
    start = time.perf_counter()

    with (
        contextlib.closing(run_log),
        StopOnInterrupt() as interrupt,
        long_lived(),
        batches,
    ):
        # On the XLA device, the loader's next batch first sends the previous step to the device.
        for step, batch in enumerate(data.steps(batches, config.steps - first), start=first + 1):
            losses = []
            num_targets = mean_targets(batch[1]) if packed else None
            for part in zip(*batch, strict=True):
                with autocast:
                    # As `next_token_loss(model, x_BT, y_BT)`, in the schedule of a pipeline.
                    loss = (
                        spmd.pipeline_loss(next_token_loss, model, *part)
                        if stages
                        else next_token_loss(model, *part, num_targets=num_targets)
                    )
                (loss / config.accumulate).backward()
                losses.append(loss.detach())
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            # Here and not before the backward: gradients that outlive their step would take memory.
            optimizer.zero_grad()

            if stages and report.bubble is None:
                report.bubble = bubble(stages)
                idle = ", ".join(f"{value:.4f} {name}" for name, value in report.bubble.items())
                run_log.say(f"pipe   {stages.extra_repr()}: idle part of the ticks {idle}")
            meter.add(step, torch.stack(losses).mean(), grad_norm, lr)
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
            else:
                meter.read_due()
            if config.save_every and step % config.save_every == 0 and step < config.steps:
                try:
                    save(step)
                except SaveError as error:  # the disk may have space by the next save
                    run_log.say(f"error: {error} The run goes on.")
            if interrupt.ends_run():
                run_log.say(f"interrupted: ending after step {step} of {config.steps}")
                break
        if on_xla:
            spmd.sync()
        if spmd.is_planning():
            return report  # there are no values to write
        meter.read(up_to=config.steps)
        if config.checkpoint and first < config.steps:
            save(step)
        report = meter.finished(
            wall_s=time.perf_counter() - start, interrupted=interrupt.has_ended_run
        )
        run_log.finish(report)
    if config.results:
        report.write(config.results)
    return report


def next_token_loss(
    model: nn.Module,
    x_BT: torch.Tensor,
    y_BT: torch.Tensor,
    position_BT: torch.Tensor | None = None,
    document_BT: torch.Tensor | None = None,
    *,
    num_targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross entropy over the tokens of a batch: a float32 scalar on the batch's device.

    Args:
        model: the model.
        x_BT, y_BT: tokens, and what follows each; -100 where nothing does.
        position_BT, document_BT: of packed documents.
        num_targets: what to divide the sum by, in place of the number of this part's targets.
    """
    packed = (
        {} if document_BT is None else {"position_ids": position_BT, "document_ids": document_BT}
    )
    logits_BTV = model(x_BT, **packed).logits
    scores, targets = logits_BTV.float().flatten(0, 1), y_BT.flatten()
    if num_targets is None:
        return F.cross_entropy(scores, targets)
    return F.cross_entropy(scores, targets, reduction="sum") / num_targets


def mean_targets(y_ABT: torch.Tensor) -> torch.Tensor:
    """The mean number of targets of a part, so that the parts' losses have the batch's mean."""
    return (y_ABT != NO_TARGET).sum() / len(y_ABT)


def bubble(stages: spmd.Pipeline) -> dict[str, float]:
    """The idle part of a stage's ticks: as the step was recorded, and by the formula."""
    p, m, v = stages.plan.num_stages, stages.plan.num_microbatches, stages.plan.rounds
    return {
        "measured": (stages.num_runs - stages.num_useful_runs) / stages.num_runs,
        "formula": (p - 1) / (v * m + p - 1),
    }


@torch.no_grad()
def evaluate(model: nn.Module, batches: MpDeviceLoader, autocast: torch.autocast) -> float:
    """Mean loss over the batches, without dropout. Waits for the device."""
    model.eval()
    losses = []
    for batch in batches:
        with autocast:
            losses.append(next_token_loss(model, *(x_ABT[0] for x_ABT in batch)))
    model.train()
    return sum(map(on_host, losses)) / len(losses)


def perplexity(loss: float) -> float:
    """`exp(loss)`, or infinity where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


# --- The command line -----------------------------------------------------------------------------


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
    compare("examples.gpt2.train", variants, common=common, folder=Path(COMPARED))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    given = sys.argv[1:] if argv is None else argv

    def command() -> bool:
        config = config_from(given, usage=__doc__)
        if "--compare" in given:
            compare_strategies(config, given)
            return False
        return run(config).interrupted

    return exit_code(command, usage=(TextError,))


if __name__ == "__main__":
    sys.exit(main())
