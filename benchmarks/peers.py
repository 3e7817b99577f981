"""Does training cost more than under PyTorch's own FSDP2, DDP and tensor parallelism, in CPU time?

The same models, data and optimizers, on two devices: two emulated ones in one process here, two
processes over gloo there. Losses are compared step by step.

- GPT-2 (4 layers, width 256) with `fully_shard` on each block, of this package and of torch.
- ResNet-18 on images of 64 x 64, with the batch split here and `DistributedDataParallel` there. Its
  norms are of groups: each process of DDP would have its own statistics of a batch.
- Llama (4 layers, width 256) by the recipe's plan of tensor and sequence parallelism, which
  `parallelize_module` gets, of this package and of torch.

    python -m benchmarks.peers

`--side theirs --results FILE` measures one side of one recipe alone, of other sizes, as the
published plots do.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import new_file, whole
from benchmarks.peer_sizes import RECIPES, SIZES_HELP, Sizes
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=whole(), default=20, help="measured steps (default: 20)")
    parser.add_argument("--rounds", type=whole(), default=3, help="runs of each side (default: 3)")
    parser.add_argument("--recipe", choices=RECIPES, help="one recipe alone")
    parser.add_argument("--side", choices=("ours", "theirs"), help="one side alone, of --recipe")
    parser.add_argument(
        "--results", type=new_file, help="with --side: file for its figures as JSON"
    )
    sizes = parser.add_argument_group("sizes, with --side")
    sizes.add_argument("--preset", default=Sizes.preset, help="of the recipe (default: tiny)")
    for name, text in SIZES_HELP.items():
        default = getattr(Sizes, name)
        sizes.add_argument(f"--{name}", type=whole(), default=default, help=f"{text} ({default})")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=whole(0), default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()

import spmd_core as spmd  # before torchvision, whose compiled part may be built for another torch

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18
from transformers import LlamaForCausalLM

from examples.gpt2 import model as gpt2
from examples.gpt2 import presets as gpt2_presets
from examples.gpt2 import shardings as gpt2_shardings
from examples.llama_tp import model as llama
from examples.llama_tp import presets as llama_presets
from examples.llama_tp import shardings as llama_shardings

NUM_WARM = 4  # steps before the measured ones: two compile, and gloo connects
MOST_DIFFERENCE = 1e-4  # of two losses, relative; float32 sums in another order
IMAGES, SIZE, NUM_CLASSES = 16, 64, 10


def model_of(recipe: str, sizes: Sizes) -> Any:
    """The model, with weights from a fixed seed, on the CPU."""
    torch.manual_seed(0)
    if recipe == "gpt2":
        preset = gpt2_presets.PRESETS[sizes.preset]
        return gpt2.build_model(preset, vocab_size=sizes.vocab, dropout=0.0)
    if recipe == "llama":
        llama_preset = llama_presets.PRESETS[sizes.preset]
        return llama.build_model(llama_preset, vocab_size=sizes.vocab, positions=sizes.seq)
    return resnet18(num_classes=NUM_CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def optimizer_of(recipe: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the recipe has."""
    if recipe != "resnet":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    # At 1e-3, eager torch's own losses in float32 and float64 are 6e-4 apart by step 13.
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)


def batch_of(recipe: str, step: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, over all devices."""
    generator = torch.Generator().manual_seed(step)
    if recipe != "resnet":
        tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(NUM_CLASSES, (IMAGES,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    # Under torch's sequence parallelism a Llama sees a part of the sequence, whose positions it
    # would count.
    is_llama = isinstance(model, LlamaForCausalLM)
    whole = torch.arange(y.shape[-1], device=x.device)[None]
    positions = {"position_ids": whole} if is_llama else {}
    out = model(x, **positions)
    logits = out.logits if hasattr(out, "logits") else out
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    *,
    end_step: Callable[[], None],
    wait: Callable[[], None],
) -> dict[str, Any]:
    """Losses, and this process's CPU and wall seconds of a step.

    `step_s` has the seconds between the ends of steps: where the device runs behind Python, only
    their sum means something.
    """
    losses, ends = [], []
    for step in range(NUM_WARM + num_steps):
        if step == NUM_WARM:
            wait()
            start = time.process_time()
            ends.append(time.perf_counter())
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        end_step()
        if step >= NUM_WARM:
            ends.append(time.perf_counter())
    wait()
    cpu_s, wall_s = time.process_time() - start, time.perf_counter() - ends[0]
    return {
        "losses": [loss.item() for loss in losses],
        "cpu_s": cpu_s / num_steps,
        "wall_s": wall_s / num_steps,
        "step_s": [b - a for a, b in itertools.pairwise(ends)],
    }


def ours(recipe: str, num_steps: int, folder: Path, sizes: Sizes) -> None:
    """Trains in this process on emulated devices."""
    spmd.simulate(sizes.devices)
    spmd.use_spmd()
    axis = {"gpt2": "fsdp", "resnet": "data", "llama": "tensor"}[recipe]
    mesh = spmd.parse_mesh(f"{axis}={sizes.devices}", sizes.devices)
    model = model_of(recipe, sizes).to("xla")
    if recipe == "gpt2":
        gpt2_shardings.parallelize(model, mesh, "fsdp")
    elif recipe == "llama":
        llama_shardings.parallelize(model, mesh, sequence_parallel=True, loss_parallel=False)
    else:
        spmd.shard_module(model, {".*": ()}, mesh)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (t.to("xla") for t in batch_of(recipe, step, sizes))
        spec = () if recipe == "llama" else (axis,)
        return spmd.mark_sharding(x, mesh, spec), spmd.mark_sharding(y, mesh, spec)

    optimizer = optimizer_of(recipe, model)
    wait = partial(spmd.sync, wait=True)
    figures = train(model, optimizer, num_steps, batch, end_step=spmd.sync, wait=wait)
    (folder / "0.json").write_text(json.dumps(figures))


def theirs(recipe: str, num_steps: int, folder: Path, rank: int, sizes: Sizes) -> None:
    """Trains one of the processes over gloo."""
    num = sizes.devices
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num)
    model = model_of(recipe, sizes)
    if recipe == "gpt2":
        mesh = dist.init_device_mesh("cpu", (num,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif recipe == "llama":
        plan = llama_shardings.plan(
            sequence_parallel=True, loss_parallel=False, splits_kv_heads=True
        )
        parallelize_module(model, dist.init_device_mesh("cpu", (num,)), plan)
    else:
        model = DistributedDataParallel(model)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if recipe == "llama":  # each process has its part of every sequence
            return batch_of(recipe, step, sizes)
        x, y = (t.chunk(num)[rank] for t in batch_of(recipe, step, sizes))
        return x, y

    optimizer = optimizer_of(recipe, model)
    figures = train(model, optimizer, num_steps, batch, end_step=lambda: None, wait=dist.barrier)
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measured(recipe: str, side: str, num_steps: int, sizes: Sizes) -> dict[str, Any]:
    """The figures of one side: mean losses, CPU seconds of all processes, wall seconds.

    Raises:
        RuntimeError: a process failed; its output is on the console.
    """
    num = 1 if side == "ours" else sizes.devices
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.peers", "--recipe", recipe, "--side", side]
        command += ["--steps", str(num_steps), "--folder", folder, *sizes.options()]
        children = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(num)]
        codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(
                f"every process must end well; got exit codes {codes} of {' '.join(command)}. "
                "What they said is above."
            )
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num)]
    losses = [sum(each) / num for each in zip(*(figures["losses"] for figures in found))]
    return {
        "losses": losses,
        "cpu_s": sum(figures["cpu_s"] for figures in found),
        "wall_s": max(figures["wall_s"] for figures in found),
        "step_s": [max(each) for each in zip(*(figures["step_s"] for figures in found))],
        "tokens": sizes.batch * sizes.seq,
    }


def compared(num_steps: int, rounds: int, recipes: Sequence[str]) -> list[dict[str, Any]]:
    """Both sides of each recipe in turns, `rounds` times; the least CPU time of each counts."""
    results = []
    for recipe in recipes:
        sides: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": []}
        for number in range(rounds):
            for side, found in sides.items():
                print(f"{recipe}, {side}, round {number + 1} of {rounds}", flush=True)
                found.append(measured(recipe, side, num_steps, Sizes()))
        best = {side: min(found, key=lambda f: f["cpu_s"]) for side, found in sides.items()}
        pairs = zip(best["theirs"]["losses"], best["ours"]["losses"])
        difference = max(abs(a - b) / abs(a) for a, b in pairs)
        for side, found in sides.items():
            best[side] |= {"cpu_samples_s": [figures["cpu_s"] for figures in found]}
        results.append({"recipe": recipe, "difference": difference, **best})
    return results


def table_of(results: Sequence[dict[str, Any]], agrees: bool, is_cheaper: bool) -> Table:
    """The table of the results."""
    peers = {
        "gpt2": "torch's fully_shard",
        "resnet": "DistributedDataParallel",
        "llama": "torch's parallelize_module",
    }
    rows = [
        (
            f"{r['recipe']}, against {peers[r['recipe']]}",
            f"{r['theirs']['losses'][-1]:.4f}",
            f"{r['ours']['losses'][-1]:.4f}",
            f"{r['difference']:.0e}",
            f"{r['theirs']['cpu_s'] * 1e3:,.0f} ms",
            f"{r['ours']['cpu_s'] * 1e3:,.0f} ms",
            f"{r['ours']['cpu_s'] / r['theirs']['cpu_s']:.2f}",
            f"{r['ours']['wall_s'] / r['theirs']['wall_s']:.2f}",
        )
        for r in results
    ]
    columns = ("", "last loss, theirs", "ours", "largest difference", "CPU of a step, theirs")
    notes = (
        "Theirs: two processes over gloo. Ours: one process with two emulated devices. CPU time is "
        "of all processes and threads; of several rounds in turns, the least counts.",
        f"{verdict(agrees)}: losses differ by at most {MOST_DIFFERENCE:.0e}.",
        f"{verdict(is_cheaper)}: the CPU time is at most theirs.",
    )
    return Table(
        "Training beside PyTorch's own FSDP2, DDP and tensor parallelism",
        (*columns, "ours", "ratio", "wall ratio"),
        rows,
        notes,
    )


def main(args: argparse.Namespace) -> int:
    if args.side:
        chosen = Sizes(args.preset, args.vocab, args.seq, args.batch, args.devices)
        if not args.recipe or not (args.folder or args.results):
            parser.error("--side needs --recipe and --results")
        if args.results:
            figures = measured(args.recipe, args.side, args.steps, chosen)
            args.results.write_text(json.dumps(figures, indent=1) + "\n")
        elif args.side == "ours":
            ours(args.recipe, args.steps, args.folder, chosen)
        else:
            theirs(args.recipe, args.steps, args.folder, args.rank, chosen)
        return 0
    recipes = [args.recipe] if args.recipe else list(RECIPES)
    results = compared(args.steps, args.rounds, recipes)
    agrees = all(r["difference"] <= MOST_DIFFERENCE for r in results)
    is_cheaper = all(r["ours"]["cpu_s"] <= r["theirs"]["cpu_s"] for r in results)
    table = table_of(results, agrees, is_cheaper)
    table.show()
    if not args.recipe:
        publish("peers", table, {"results": results})
    return 0 if agrees and is_cheaper else 1


if __name__ == "__main__":
    sys.exit(main(args))
