"""Trains GPT-2 on real text: single-device PyTorch, plus a mesh and a few sharding marks.

    python -m examples.gpt2.train --smoke
        a few steps on one device, in seconds
    python -m examples.gpt2.train --smoke --devices 8 --mesh fsdp=4,tensor=2
        the same on eight emulated devices
    python -m examples.gpt2.train --preset 124M --mesh fsdp=8 --dtype bf16
        on a machine with eight accelerators
    python -m examples.gpt2.train --smoke --devices 8 --mesh auto
        the mesh and the shardings are found, and the recipe marks nothing
    python -m examples.gpt2.train --smoke --device cpu
        eager torch, whose losses every mesh must reproduce

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence.
"""

from examples.gpt2.config import TrainConfig, config_from, with_defaults
from examples.training.knobs import begin_command

if __name__ == "__main__":  # before the imports below, which take seconds
    begin_command(lambda: with_defaults(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import math
import sys
from functools import partial

import torch
from torch import Tensor, nn

from examples.gpt2 import data, resolve, shardings
from examples.gpt2.model import mean_targets, next_token_loss
from examples.training import resume
from examples.training.command import device_of, exit_code
from examples.training.evaluation import mean_loss, perplexity
from examples.training.journal import Journal
from examples.training.log import Report
from examples.training.one_program import one_program
from examples.training.remat import recompute
from examples.training.schedule import decay_groups, warmup_and_cosine
from spmd_data import MpDeviceLoader


def run(config: TrainConfig) -> Report:
    """One training run, from text to report.

    Raises:
        UsageError, spmd.errors.MeshError: the options, the text, the saved run or the mesh cannot
            work; raised before the model is built.
        SaveError: the run's state could not be written at its end.
    """
    config = with_defaults(config)
    first = resume.step_of(config)

    # --- Devices, mesh and data: before the model, so that a wrong path fails within seconds ------
    device, mesh = device_of(config), resolve.parsed_mesh(config)
    resume.check_writable(config)
    text = data.load(config)
    input_sharding = shardings.batch_sharding(mesh, minibatch=config.pack) if mesh else None
    batches, eval_batches = (
        MpDeviceLoader(part, device, input_sharding=input_sharding)
        for part in data.batches(text, config, mesh)
    )

    # --- Model: single-device code ----------------------------------------------------------------
    model = resolve.model_of(config, device)
    # Before the shardings: parameters are then gathered for each of a block's two runs.
    recompute(model.transformer.h, config.remat)
    if config.scan:
        spmd.scan_model(model, loops=min(6, round(math.sqrt(model.config.n_layer))))

    # --- Shardings: everything that many devices need ---------------------------------------------
    stages = None
    if mesh and config.strategy == "pipeline":
        stages = shardings.pipeline(model, mesh, **resolve.pipeline_options(config, mesh))
    elif mesh:
        shardings.parallelize(model, mesh, config.strategy)
    loss_of = partial(spmd.pipeline_loss, next_token_loss) if stages else next_token_loss
    if resolve.draws_on_device(config):
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards

    # --- Optimizer --------------------------------------------------------------------------------
    groups = decay_groups(model.parameters(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    scheduler = warmup_and_cosine(optimizer, config, floor=config.min_lr / config.lr)

    # --- The run's record: log, figures, saved states; here a resumed run gets its state ----------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    work = resolve.work_of(config)
    journal = Journal(config, first, device=device, mesh=mesh, work=work, data=text, parts=parts)

    # --- Step -------------------------------------------------------------------------------------
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    @one_program(config)
    def train(*batch: Tensor) -> tuple[Tensor, Tensor]:
        divisor = {"num_targets": mean_targets(batch[1])} if config.pack else {}
        losses = []
        for part in zip(*batch, strict=True):
            with autocast:
                loss = loss_of(model, *part, **divisor)
            (loss / config.accumulate).backward()
            losses.append(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        # Here and not before the backward: gradients that outlive their step would take memory.
        optimizer.zero_grad()
        return torch.stack(losses).mean(), grad_norm

    # --- Loop -------------------------------------------------------------------------------------
    with journal, batches:
        for _, batch in journal.steps(batches):
            journal.add(*train(*batch))
            scheduler.step()
            if stages and journal.report.bubble is None:
                journal.report.bubble = shardings.bubble(stages)
            if journal.evaluation_is_due():
                eval_loss = mean_loss(model, eval_batches, next_token_loss, autocast)
                journal.evaluated(loss=eval_loss, perplexity=perplexity(eval_loss))
        return journal.finish()


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(lambda: run(config_from(argv, usage=__doc__)).exit_code)


if __name__ == "__main__":
    sys.exit(main())
