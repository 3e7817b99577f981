"""Trains Llama on real text by the plans of tensor, sequence and loss parallelism.

    python -m examples.llama_tp.train --smoke
        a few steps on one device, in seconds
    python -m examples.llama_tp.train --smoke --devices 8 --mesh data=2,tensor=4 --loss-parallel
        the same on eight emulated devices; add --sequence-parallel to split activations too
    python -m examples.llama_tp.train --preset 7B --mesh fsdp=8,tensor=8 --dtype bf16 --remat full
        on a pod; add --sequence-parallel --loss-parallel
    python -m examples.llama_tp.train --weights FOLDER --lora 16 --adapters OUT --prompt "Once"
        fine-tuning of a model in Hugging Face's layout, by adapters
    python -m examples.llama_tp.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce
    python -m examples.llama_tp.train --smoke --devices 8 --compare
        every plan in turn, with a table and a plot

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence, V vocabulary.
"""

from examples.llama_tp.config import check_options, config_from
from examples.training.knobs import check_command_line

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    check_command_line(lambda: check_options(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from examples.llama_tp import data, lora, shardings, weights
from examples.llama_tp.config import COMPARED, TrainConfig
from examples.llama_tp.model import build_model
from examples.llama_tp.resolve import parsed_mesh, sizes, with_defaults
from examples.training import resume
from examples.training.collector import long_lived
from examples.training.command import exit_code, num_real_devices, start_devices
from examples.training.compare import Variant, compare
from examples.training.host_values import on_host
from examples.training.knobs import KnobError
from examples.training.layouts import layout_table
from examples.training.log import Report, RunLog
from examples.training.meter import Meter
from examples.training.remat import recompute
from examples.training.resume import SaveError
from examples.training.schedule import lr_factor
from examples.training.text import TextData, TextError
from examples.training.timing import StopOnInterrupt
from spmd_core.metrics import ModelSize, device_kind, device_peak, flops_per_token
from spmd_data import MpDeviceLoader

DEVICE_INIT_ABOVE = 200_000_000  # parameters; larger models are not built on the host first
# Losses are read this many steps late, so that the device never waits for Python to send the next
# step.
READ_LAG = 2


def run(config: TrainConfig) -> Report:
    """One training run, from text to report.

    Raises:
        KnobError, TextError, ResumeError, spmd.MeshError: the options, the text, the saved run or
            the mesh cannot work; raised before the model is built.
        spmd.DataError: the files of --weights are damaged, or do not hold the model of their
            config.json.
        SaveError: the run's state, the model or the adapters could not be written at its end.
    """
    config = with_defaults(config)
    preset = sizes(config)
    on_xla = config.device == "xla"
    saved = resume.read(config) if config.resume else None

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
            "--export": config.export and f"{config.export}/config.json",
            "--adapters": config.adapters and f"{config.adapters}/adapter_config.json",
        }
    )

    # --- Data: before the model, so that a wrong path fails within seconds ------------------------
    text = data.load(config)

    # --- Model: single-device code ----------------------------------------------------------------
    torch.manual_seed(config.seed)
    is_large = preset.num_params(config.vocab) > DEVICE_INIT_ABOVE
    # Weights that come from files are recorded on the device and then never drawn.
    inits_on_device = bool(config.weights) or config.init == "device"
    inits_on_device = inits_on_device or (config.init == "auto" and is_large)
    with device if inits_on_device else torch.device("cpu"):
        model = (
            LlamaForCausalLM(weights.model_config(config.weights)).train()
            if config.weights
            else build_model(preset, vocab_size=config.vocab, positions=config.seq)
        )
    model.to(device)
    num_params = sum(p.numel() for p in model.parameters())
    stored = model.state_dict(keep_vars=True)  # by the names in files; adapters change them
    adapted = None
    if config.lora:
        adapted = lora.add(model, rank=config.lora, alpha=config.lora_alpha, seed=config.seed)
    recompute(model.model.layers, config.remat)

    # --- Shardings: everything that many devices need ---------------------------------------------
    input_sharding = None
    if mesh:
        shardings.parallelize(
            model,
            mesh,
            sequence_parallel=config.sequence_parallel,
            loss_parallel=config.loss_parallel,
            has_adapters=bool(config.lora),
        )
        input_sharding = shardings.batch_sharding(mesh)
    if config.weights and not saved:
        spmd.load_safetensors(stored, config.weights)  # each device's shards alone
    if inits_on_device and on_xla:
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    trained = [p for p in model.parameters() if p.requires_grad]  # with LoRA, only the adapters
    num_trained = sum(p.numel() for p in trained)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), foreach=True)
    floor = config.min_lr / config.lr
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_factor(step, steps=config.steps, warmup=config.warmup, floor=floor),
    )

    # --- Where the run begins ---------------------------------------------------------------------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = resume.restore(saved, data=text.identity, parts=parts) if saved else 0
    train_batches, eval_batches = data.batches(text, config, first=first)

    def save(step: int) -> None:
        if on_xla:
            spmd.sync()  # ends the step: its program is the same as that of a step without a save
        if spmd.is_planning():
            return
        path = config.checkpoint.replace("{step}", str(step))
        resume.save(path, step=step, config=config, data=text.identity, parts=parts)
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
        run_log.table(layout_table(model, input_sharding))
    run_log.say(f"text   {text.summary}")
    run_log.say(
        f"model  Llama {preset.name}, {num_params:,} parameters, "
        f"on {num_devices} {config.device} device(s) {axes or ''}"
    )
    if config.lora:
        run_log.say(f"lora   rank {config.lora}, {num_trained:,} parameters")
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
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq, num_trained)
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
        MpDeviceLoader(train_batches, device, input_sharding=input_sharding) as batches,
    ):
        # On the XLA device, the loader's next batch first sends the previous step to the device.
        # None where a finished run is resumed.
        rest = itertools.islice(batches, config.steps - first)
        for step, (x_ABT, y_ABT) in enumerate(rest, start=first + 1):
            losses = []
            for x_BT, y_BT in zip(x_ABT, y_ABT, strict=True):
                with autocast:
                    loss = next_token_loss(model, x_BT, y_BT)
                (loss / config.accumulate).backward()
                losses.append(loss.detach())
            grad_norm = nn.utils.clip_grad_norm_(trained, config.clip or math.inf)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            # Here and not before the backward: gradients that outlive their step would take memory.
            optimizer.zero_grad()

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
                meter.evaluated(step, loss=eval_loss)
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

    # --- What was trained: text, and files for other machines -------------------------------------
    if config.prompt:
        print(continued(model, text, config.prompt, num_tokens=config.new_tokens))
    if config.adapters:
        lora.save(adapted, config.adapters)
    if config.export:
        merged = adapted.merge_and_unload() if adapted else model
        weights.export(merged, text, config.export, source=config.weights)
    return report


def next_token_loss(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the tokens of a batch: a float32 scalar on the batch's device."""
    logits_BTV = model(x_BT).logits
    return F.cross_entropy(logits_BTV.float().transpose(1, 2), y_BT)


def continued(model: LlamaForCausalLM, text: TextData, prompt: str, *, num_tokens: int) -> str:
    """The prompt and its likeliest continuation, token by token. Waits for the device."""
    ids = [text.separator, *text.tokenizer.encode(prompt, add_special_tokens=False).ids]
    ids_BT = torch.tensor([ids], device=model.device)
    model.eval()
    found_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=text.separator,
    )
    model.train()
    return text.tokenizer.decode(found_BT[0].tolist()[1:])


@torch.no_grad()
def evaluate(model: nn.Module, batches: MpDeviceLoader, autocast: torch.autocast) -> float:
    """Mean loss over the batches. Waits for the device."""
    model.eval()
    losses = []
    for x_ABT, y_ABT in batches:
        with autocast:
            losses.append(next_token_loss(model, x_ABT[0], y_ABT[0]))
    model.train()
    return sum(map(on_host, losses)) / len(losses)


# --- The command line -----------------------------------------------------------------------------


def compare_plans(config: TrainConfig, argv: Sequence[str]) -> None:
    """Runs every plan on the meshes that it takes, each in a process, and compares them.

    Raises:
        KnobError: an option that the comparison chooses itself is given, or there are too few
            devices.
        CompareError: a run failed.
    """
    chosen = {"mesh": config.mesh, "results": config.results, "log-dir": config.log_dir}
    chosen |= {"export": config.export, "adapters": config.adapters}
    given = [f"--{name}" for name, value in chosen.items() if value]
    given += [name for name in ("--sequence-parallel", "--loss-parallel") if name in argv]
    if given or config.device == "cpu":
        raise KnobError(
            "--compare chooses --mesh, the plans, --results, --log-dir and --device itself, and "
            f"writes no model; got {', '.join(given) or '--device cpu'}. Leave them out."
        )
    num_devices = config.devices or num_real_devices()
    num_heads = sizes(config).num_heads
    meshes = shardings.compared(num_devices, num_heads)
    if not meshes:
        raise KnobError(
            f"--compare needs an even number of devices; got {num_devices}. "
            "Pass for instance --devices 8, which emulates them."
        )

    def options(devices: int, *others: str) -> list[str]:
        return [*(["--devices", str(devices)] if config.devices else []), *others]

    variants = [Variant("one device", options(1))]
    variants += [
        Variant(name, options(num_devices, "--mesh", mesh, *flags)) for name, mesh, flags in meshes
    ]
    common = [argument for argument in argv if argument != "--compare"]
    compare("examples.llama_tp.train", variants, common=common, folder=Path(COMPARED))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    given = sys.argv[1:] if argv is None else argv

    def command() -> bool:
        config = config_from(given, usage=__doc__)
        if "--compare" in given:
            compare_plans(config, given)
            return False
        return run(config).interrupted

    return exit_code(command, usage=(TextError, spmd.DataError))


if __name__ == "__main__":
    sys.exit(main())
