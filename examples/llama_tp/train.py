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

Legend: A parts of a batch, B sequences of a part, T tokens of a sequence.
"""

from examples.llama_tp.config import TrainConfig, check_options, config_from
from examples.training.knobs import begin_command

if __name__ == "__main__":  # before the imports below, which take seconds
    begin_command(lambda: check_options(config_from(None, usage=__doc__)))

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import math
import sys

import torch
from torch import Tensor, nn

from examples.llama_tp import data, lora, resolve, results, shardings, weights
from examples.llama_tp.model import next_token_loss
from examples.training import resume
from examples.training.command import device_of, exit_code
from examples.training.evaluation import mean_loss
from examples.training.journal import Journal
from examples.training.layouts import layout_table
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
        spmd.errors.DataError, spmd.errors.CheckpointError: the files of --weights are damaged, or
            do not hold the model of their config.json.
        SaveError: the run's state, the model or the adapters could not be written at its end.
    """
    config = resolve.with_defaults(config)
    first = resume.step_of(config)

    # --- Devices, mesh and data: before the model, so that a wrong path fails within seconds ------
    device, mesh = device_of(config), resolve.parsed_mesh(config)
    resume.check_writable(config, results.files(config))
    text = data.load(config)
    input_sharding = shardings.batch_sharding(mesh) if mesh else None
    batches, eval_batches = (
        MpDeviceLoader(part, device, input_sharding=input_sharding)
        for part in data.batches(text, config)
    )

    # --- Model: single-device code ----------------------------------------------------------------
    model = resolve.model_of(config, device)
    num_params = sum(p.numel() for p in model.parameters())
    stored = model.state_dict(keep_vars=True)  # by the names in files; adapters change them
    adapted = lora.add(model, rank=config.lora, alpha=config.lora_alpha, seed=config.seed)
    recompute(model.model.layers, config.remat)
    if config.scan:
        spmd.scan_model(model, loops=min(6, round(math.sqrt(model.config.num_hidden_layers))))

    # --- Shardings: everything that many devices need ---------------------------------------------
    if mesh:
        shardings.parallelize(model, mesh, **resolve.plan_options(config))
    if config.weights and first is None and not config.finds_mesh:
        weights.load(stored, config.weights)  # each device's shards alone
    if resolve.draws_on_device(config):
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards

    # --- Optimizer --------------------------------------------------------------------------------
    trained = [p for p in model.parameters() if p.requires_grad]  # with LoRA, only the adapters
    num_trained = sum(p.numel() for p in trained)
    groups = decay_groups(trained, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    scheduler = warmup_and_cosine(optimizer, config, floor=config.min_lr / config.lr)

    # --- The run's record: log, figures, saved states; here a resumed run gets its state ----------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    work = resolve.work_of(config, num_params=num_params, num_trained=num_trained)
    journal = Journal(config, first, device=device, mesh=mesh, work=work, data=text, parts=parts)
    results.describe(config, model, adapted, text)
    if mesh:
        journal.log.table(layout_table(model, input_sharding))
    if config.lora:
        journal.log.say(f"lora   rank {config.lora}, {num_trained:,} parameters")

    # --- Step -------------------------------------------------------------------------------------
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    @one_program(config)
    def train(x_ABT: Tensor, y_ABT: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for x_BT, y_BT in zip(x_ABT, y_ABT, strict=True):
            with autocast:
                loss = next_token_loss(model, x_BT, y_BT)
            (loss / config.accumulate).backward()
            losses.append(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(trained, config.clip or math.inf)
        optimizer.step()
        # Here and not before the backward: gradients that outlive their step would take memory.
        optimizer.zero_grad()
        return torch.stack(losses).mean(), grad_norm

    # --- Loop -------------------------------------------------------------------------------------
    with journal, batches:
        for _, batch in journal.steps(batches):
            journal.add(*train(*batch))
            scheduler.step()
            if journal.evaluation_is_due():
                eval_loss = mean_loss(model, eval_batches, next_token_loss, autocast)
                journal.evaluated(loss=eval_loss)
        report = journal.finish()
    results.write(config, model, adapted, text, mesh)
    return report


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    usage = (spmd.errors.DataError, spmd.errors.CheckpointError)
    return exit_code(lambda: run(config_from(argv, usage=__doc__)).exit_code, usage=usage)


if __name__ == "__main__":
    sys.exit(main())
