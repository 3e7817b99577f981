"""Trains GPT-2 on real text: single-device PyTorch, plus a mesh and a few sharding marks.

    python -m examples.gpt2.train --smoke
        a few steps on one device, in seconds
    python -m examples.gpt2.train --smoke --devices 8 --mesh fsdp=4,tensor=2
        the same on eight emulated devices
    python -m examples.gpt2.train --preset 124M --mesh fsdp=8 --dtype bf16
        on a machine with eight accelerators
    python -m examples.gpt2.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence.
"""

from examples.gpt2.config import config_from, with_defaults
from examples.training.knobs import check_command_line

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    check_command_line(lambda: with_defaults(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import math
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from examples.gpt2 import data, shardings
from examples.gpt2.config import TrainConfig, check_resumable
from examples.gpt2.model import build_model, mean_targets, next_token_loss
from examples.gpt2.presets import PRESETS, padded_vocab
from examples.gpt2.resolve import draws_on_device, parsed_mesh, pipeline_options
from examples.training import resume
from examples.training.command import device_of, exit_code
from examples.training.host_values import on_host
from examples.training.journal import Journal
from examples.training.log import Report
from examples.training.remat import recompute
from examples.training.schedule import decay_groups, warmup_and_cosine
from examples.training.text_sources import TextError
from spmd_core.metrics import ModelSize, flops_per_token
from spmd_data import MpDeviceLoader


def run(config: TrainConfig) -> Report:
    """One training run, from text to report; one function, to read as the experiment.

    Raises:
        KnobError, TextError, ResumeError, spmd.errors.MeshError: the options, the text, the saved
            run or the mesh cannot work; raised before the model is built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    saved = resume.read(config)
    check_resumable(config, saved)

    # --- Devices, mesh and data: before the model, so that a wrong path fails within seconds ------
    device, mesh = device_of(config), parsed_mesh(config)
    resume.check_writable(config)
    text = data.load(config)
    first = saved["step"] if saved else 0
    train_batches, eval_batches = data.batches(text, config, mesh, first=first)

    # --- Model: single-device code ----------------------------------------------------------------
    preset = PRESETS[config.preset]
    vocab_size = padded_vocab(config.vocab, config.pad_vocab)
    num_params = preset.num_params(vocab_size)
    draws_on = device if draws_on_device(config) else torch.device("cpu")
    torch.manual_seed(config.seed)
    with draws_on:
        model = build_model(preset, vocab_size=vocab_size, dropout=config.dropout)
    model.to(device)
    # Before the shardings: parameters are then gathered for each of a block's two runs.
    recompute(model.transformer.h, config.remat)

    # --- Shardings: everything that many devices need ---------------------------------------------
    stages = None
    if mesh and config.strategy == "pipeline":
        stages = shardings.pipeline(model, mesh, **pipeline_options(config, mesh))
    elif mesh:
        shardings.parallelize(model, mesh, config.strategy)
    input_sharding = shardings.batch_sharding(mesh, minibatch=config.pack) if mesh else None
    loader = partial(MpDeviceLoader, device=device, input_sharding=input_sharding)
    if draws_on.type == "xla":
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    groups = decay_groups(model.parameters(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), foreach=True)
    floor = config.min_lr / config.lr
    scheduler = warmup_and_cosine(optimizer, steps=config.steps, warmup=config.warmup, floor=floor)

    # --- The run's record: log, figures, saved states; here a resumed run gets its state ----------
    batches = loader(train_batches)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if config.pack:
        parts["data"] = batches  # which knows the run's place in the data
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq)
    journal = Journal(
        *(config, saved),
        device=device,
        mesh=mesh,
        model=f"GPT-2 {preset.name}",
        num_params=num_params,
        items_per_step=config.batch * config.seq,
        unit="tokens",
        flops_per_item=flops_per_token(size),
        data=text,
        parts=parts,
    )

    # --- Loop -------------------------------------------------------------------------------------
    with journal, batches:
        for step, batch in journal.steps(batches):
            losses = []
            num_targets = mean_targets(batch[1]) if config.pack else None
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

            if stages and step == first + 1:
                journal.report.bubble = shardings.bubble(stages)
            journal.add(step, torch.stack(losses).mean(), grad_norm, lr)
            if journal.evaluates_after(step):
                eval_loss = evaluate(model, loader(eval_batches), autocast)
                journal.evaluated(step, loss=eval_loss, perplexity=perplexity(eval_loss))
            journal.save_if_due(step)
            if journal.ends_after(step):
                break
        return journal.finish()


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(lambda: run(config_from(argv, usage=__doc__)).interrupted, usage=(TextError,))


if __name__ == "__main__":
    sys.exit(main())
