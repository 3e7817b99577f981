"""What does a step cost whose layers were found and made loops (`config.fold_layers`)?

GPT-2 of 8 layers in training with AdamW, of several widths and batches, on one device, and over
emulated ones with FSDP and with replicated weights (data parallelism); in each process the same
step with layers one by one and as loops, in turns. Reported are the CPU time of the first two
steps, which compile; the CPU time of all threads of a later step; and the host's part of it, the
CPU time of the thread that records and starts it. A loop on CPUs copies each layer's weights out of
their stack, and gradients and what forward saves into stacks.
The host's part is also measured of a step without layers, AdamW over 100 small weights.

Run: python -m benchmarks.folded_steps
     python -m benchmarks.folded_steps --rounds 40
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=whole(), default=20, help="steps of each (default 20)")
    parser.add_argument("--one", help="one case in this process, as JSON, as a line of JSON")
    args = parser.parse_args()

import torch

import spmd_core as spmd
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset
from spmd_core.program.folding import choice

LAYERS, VOCAB = 8, 512
# Width, sequences and tokens of each.
SIZES = ((256, 4, 64), (256, 8, 128), (512, 4, 64), (512, 4, 128))
FSDP, DATA = "fsdp", "data"
MESHES = {"1 device": None, "fsdp=4": FSDP, "data=4": DATA}
DEVICES = 4
# What a loop may cost beside layers one by one: a step, and the host's part of it.
MAX_STEP, MAX_HOST = 1.02, 1.01
Step = Callable[[], None]


def gpt2(size: list[int], axis: str | None) -> Step:
    """A training step of GPT-2, of a width, so many sequences, and tokens of each.

    Args:
        size: these.
        axis: of the mesh, which splits the sequences, and if it is `FSDP`, the weights.
    """
    width, batch, seq = size
    preset = ModelPreset("bench", LAYERS, width, 4, VOCAB, seq, seq, batch, 1e-3)
    torch.manual_seed(0)
    model = build_model(preset, vocab_size=VOCAB, dropout=0.0).to("xla")
    tokens = torch.randint(VOCAB, (batch, seq + 1)).to("xla")
    if axis is not None:
        mesh = spmd.Mesh(range(DEVICES), (DEVICES,), (axis,))
        spmd.mark_sharding(tokens, mesh, (axis, None))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                spmd.mark_sharding(parameter, mesh, (axis if axis == FSDP else None, None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spmd.sync()

    return step


def small_weights() -> Step:
    """A step of AdamW over 100 weights of 8 x 8, one by one, without layers."""
    weights = [torch.nn.Parameter(torch.randn(8, 8).to("xla")) for _ in range(100)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, foreach=False)

    def step() -> None:
        for weight in weights:
            weight.grad = weight.detach() * 2
        optimizer.step()
        spmd.sync()

    return step


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a case's steps, for layers one by one and as loops."""
    axis = MESHES[case["mesh"]]
    if axis is not None:
        spmd.simulate(DEVICES)
        spmd.use_spmd()
    steps, first = [], []
    for folds in (False, True):
        spmd.config.fold_layers = folds
        size = case["size"]
        step = gpt2(size, axis) if size else small_weights()
        spmd.sync(wait=True)
        start = time.process_time()
        for _ in range(2):
            step()
            spmd.sync(wait=True)
        first.append(time.process_time() - start)
        steps.append(step)
    host: tuple[list[float], list[float]] = ([], [])
    whole_: tuple[list[float], list[float]] = ([], [])
    for number in range(args.rounds + 1):
        for kind in (0, 1) if number % 2 else (1, 0):
            spmd.config.fold_layers = bool(kind)
            gc.collect()
            gc.disable()
            start, thread = time.process_time(), time.thread_time()
            steps[kind]()
            host[kind].append(time.thread_time() - thread)
            spmd.sync(wait=True)
            whole_[kind].append(time.process_time() - start)
            gc.enable()
    return {
        "first_s": first,
        "step_s": [statistics.median(of[1:]) for of in whole_],
        "host_s": [statistics.median(of[1:]) for of in host],
        "step": statistics.median(b / a for a, b in list(zip(*whole_))[1:]),
        "host": statistics.median(b / a for a, b in list(zip(*host))[1:]),
    }


def name_of(case: dict[str, Any]) -> str:
    """The text for a case."""
    if not case["size"]:
        return f"AdamW, 100 weights of 8 x 8, {case['mesh']}"
    width, batch, seq = case["size"]
    return f"width {width}, {batch} x {seq} tokens, {case['mesh']}"


def main() -> int:
    if args.one:
        print(json.dumps(measured(json.loads(args.one))))
        return 0
    cases: list[dict[str, Any]] = [{"size": (), "mesh": "1 device"}]
    cases += [{"size": size, "mesh": mesh} for mesh in MESHES for size in SIZES]
    for case in tqdm(cases, desc="cases", disable=None):
        command = [sys.executable, "-P", __file__, "--rounds", str(args.rounds)]
        sources = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        env = {**os.environ, "SPMD_CACHE_DIR": "", "PYTHONPATH": os.pathsep.join(sources)}
        done = subprocess.run(
            [*command, "--one", json.dumps(case)],
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        case.update(json.loads(done.stdout.splitlines()[-1]))
    host = max(case["host"] for case in cases)
    holds, is_free = {}, {}
    for mesh in MESHES:
        worst = max(case["step"] for case in cases if case["mesh"] == mesh and case["size"])
        name = f"{mesh}: a step of loops takes at most {worst:.2f} of the CPU time of one by one, "
        holds[f"{name}at most {MAX_STEP}"] = is_free[mesh] = worst <= MAX_STEP
    folds = choice("cpu").folds_gathered
    what = 'fold_layers = "auto" makes loops with FSDP where none of those takes longer: it makes '
    holds[what + ("some" if folds else "none")] = folds == is_free["fsdp=4"]
    holds[f"the host's part at most {host:.3f}, at most {MAX_HOST}"] = host <= MAX_HOST
    rows = [
        [
            name_of(case),
            *(f"{seconds:.1f} s" for seconds in case["first_s"]),
            *(f"{1e3 * seconds:.1f} ms" for seconds in case["step_s"]),
            f"{case['step']:.3f}",
            f"{case['host']:.3f}",
        ]
        for case in cases
    ]
    columns = ["step", "first two, one by one", "as loops"]
    columns += ["CPU time, one by one", "as loops", "ratio", "ratio of the host's part"]
    notes = [
        f"GPT-2 of {LAYERS} layers with AdamW, medians of {args.rounds} steps in turns in one "
        "process; ratios are medians of those of neighbours.",
        *(f"{name}: {verdict(of)}" for name, of in holds.items()),
    ]
    table = Table("Steps whose layers were found and made loops", columns, rows, notes)
    publish("folded_steps", table, {"rounds": args.rounds, "cases": cases}, folder=args.out)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
