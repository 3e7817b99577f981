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
import math
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from examples.llama_tp import data, lora, shardings, weights
from examples.llama_tp.comparison import compare_plans
from examples.llama_tp.config import TrainConfig
from examples.llama_tp.model import build_model
from examples.llama_tp.resolve import parsed_mesh, sizes, with_defaults
from examples.training import resume
from examples.training.command import device_of, exit_code
from examples.training.host_values import on_host
from examples.training.journal import Journal
from examples.training.layouts import layout_table
from examples.training.log import Report
from examples.training.remat import recompute
from examples.training.schedule import decay_groups, warmup_and_cosine
from examples.training.text import TextData
from examples.training.text_sources import TextError
from spmd_core.metrics import ModelSize, flops_per_token
from spmd_data import MpDeviceLoader

DEVICE_INIT_ABOVE = 200_000_000  # parameters; larger models are not built on the host first


def run(config: TrainConfig) -> Report:
    """One training run, from text to report; one function, to read as the experiment.

    Raises:
        KnobError, TextError, ResumeError, spmd.errors.MeshError: the options, the text, the saved
            run or the mesh cannot work; raised before the model is built.
        spmd.errors.DataError: the files of --weights are damaged, or do not hold the model of their
            config.json.
        SaveError: the run's state, the model or the adapters could not be written at its end.
    """
    config = with_defaults(config)
    saved = resume.read(config)
    first = saved["step"] if saved else 0

    # --- Devices and mesh -------------------------------------------------------------------------
    device = device_of(config)
    mesh = parsed_mesh(config)
    resume.check_writable(
        {
            "--checkpoint": config.checkpoint,
            "--results": config.results,
            "--export": config.export and f"{config.export}/config.json",
            "--adapters": config.adapters and f"{config.adapters}/adapter_config.json",
        }
    )

    # --- Data: before the model, so that a wrong path fails within seconds ------------------------
    text = data.load(config)
    train_batches, eval_batches = data.batches(text, config, first=first)

    # --- Model: single-device code ----------------------------------------------------------------
    preset = sizes(config)
    is_large = preset.num_params(config.vocab) > DEVICE_INIT_ABOVE
    # Weights that come from files are recorded on the device and then never drawn.
    inits_on_device = bool(config.weights) or config.init == "device"
    inits_on_device = inits_on_device or (config.init == "auto" and is_large)
    torch.manual_seed(config.seed)
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
    if mesh:
        shardings.parallelize(
            model,
            mesh,
            sequence_parallel=config.sequence_parallel,
            loss_parallel=config.loss_parallel,
            has_adapters=bool(config.lora),
        )
    input_sharding = shardings.batch_sharding(mesh) if mesh else None
    loader = partial(MpDeviceLoader, device=device, input_sharding=input_sharding)
    if config.weights and not saved:
        spmd.load_safetensors(stored, config.weights)  # each device's shards alone
    if inits_on_device and config.device == "xla":
        spmd.sync()  # draws the weights in a separate program; each device draws only its shards
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bf16")

    # --- Optimizer --------------------------------------------------------------------------------
    trained = [p for p in model.parameters() if p.requires_grad]  # with LoRA, only the adapters
    num_trained = sum(p.numel() for p in trained)
    groups = decay_groups(trained, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), foreach=True)
    scheduler = warmup_and_cosine(
        optimizer, steps=config.steps, warmup=config.warmup, floor=config.min_lr / config.lr
    )

    # --- Where the run begins ---------------------------------------------------------------------
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if saved:
        resume.restore(saved, data=text.identity, parts=parts)
    size = ModelSize(num_params, preset.num_layers, preset.width, config.seq, num_trained)
    journal = Journal(
        config,
        device=device,
        mesh=mesh,
        num_params=num_params,
        items_per_step=config.batch * config.seq,
        unit="tokens",
        flops_per_item=flops_per_token(size),
        first=first,
        data=text.identity,
        parts=parts,
    )
    if mesh:
        journal.log.table(layout_table(model, input_sharding))
    journal.log.say(f"text   {text.summary}")
    journal.log.say(f"model  Llama {preset.name}, {num_params:,} parameters, on {journal.where}")
    if config.lora:
        journal.log.say(f"lora   rank {config.lora}, {num_trained:,} parameters")
    if config.resume:
        journal.log.say(resume.said(config, saved, lr=scheduler.get_last_lr()[0]))

    # --- Loop -------------------------------------------------------------------------------------
    with journal, loader(train_batches) as batches:
        for step, (x_ABT, y_ABT) in journal.steps(batches):
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

            journal.add(step, torch.stack(losses).mean(), grad_norm, lr)
            if journal.evaluates_after(step):
                eval_loss = evaluate(model, loader(eval_batches), autocast)
                journal.evaluated(step, loss=eval_loss)
            journal.save_if_due(step)
            if journal.ends_after(step):
                break
        report = journal.finish()

    # --- What was trained: text, and files for other machines -------------------------------------
    if spmd.is_planning():
        return report  # there are no values to write
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    given = sys.argv[1:] if argv is None else argv

    def command() -> bool:
        config = config_from(given, usage=__doc__)
        if "--compare" in given:
            compare_plans(config, given)
            return False
        return run(config).interrupted

    return exit_code(command, usage=(TextError, spmd.errors.DataError))


if __name__ == "__main__":
    sys.exit(main())
