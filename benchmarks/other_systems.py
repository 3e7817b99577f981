"""How fast is one torch_xla program here, under torch_xla itself, and written for torchax?

The program (`systems/torch_xla_program.py`) trains one of three models over emulated devices, by
`mark_sharding`: Hugging Face's GPT-2 with its parameters split over one axis, and beside it single
operations; Hugging Face's Llama with its parameters split over two; torchvision's ResNet-18 with
its images split by batch, rows and columns. It runs unchanged here and under torch_xla 2.9, whose
wheel needs torch 2.9. `systems/torchax_program.py` computes GPT-2's step by torchax, as a function
that jax.jit compiles. Each runs in its own interpreter, in turns; losses are compared step by step.

Each system that is at hand is measured, the others are named:

    python3.11 -m venv /tmp/others
    /tmp/others/bin/pip install torch==2.9.1 torch_xla==2.9.0 torchvision==0.24.1
        torchax==0.0.13 jax==0.10.2 optax numpy transformers
    python -m benchmarks.other_systems --torch-xla /tmp/others/bin/python
        --torchax /tmp/others/bin/python

Without --torchax, torchax is measured if this Python has it.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.options import interpreter, whole
from benchmarks.report import Table, argument_parser, publish, verdict

SYSTEMS = Path(__file__).with_name("systems")
OURS, TORCH_XLA, TORCHAX = "this project", "torch_xla", "torchax"
PROGRAMS = {
    OURS: "torch_xla_program.py",
    TORCH_XLA: "torch_xla_program.py",
    TORCHAX: "torchax_program.py",
}
# What a recipe trains, its mesh, and the name of its results.
RECIPES = {
    "gpt2": (
        "GPT-2 of 4 layers, width 256, batch 8 x 256, float32, AdamW",
        {"fsdp": 4},
        "other_systems",
    ),
    "llama": (
        "Llama of 4 layers, width 256, batch 8 x 256, float32, AdamW",
        {"fsdp": 4, "tensor": 2},
        "other_systems_llama",
    ),
    "resnet": (
        "ResNet-18 on 16 images of 64 x 64, float32, SGD with momentum",
        {"data": 2, "height": 2, "width": 2},
        "other_systems_resnet",
    ),
}
# Relative; float32 sums in another order. At 1e-3, AdamW's first steps amplify them.
MOST_DIFFERENCE = 1e-4
STEP = {
    "wall_s": "a step, wall time, ms",
    "cpu_s": "a step, CPU time of all threads, ms",
    "record_s": "recording it, ms",
    "dispatch_s": "ending it, CPU time, ms",
}


def measured(python: str, program: str, words: Sequence[str], num_devices: int) -> dict[str, Any]:
    """The figures of one run of a program, by an interpreter that has its system.

    Raises:
        RuntimeError: it failed; its last line, and what to do.
    """
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    given = {
        "PJRT_DEVICE": "CPU",
        "JAX_PLATFORMS": "cpu",
        "CPU_NUM_DEVICES": str(num_devices),
        "SPMD_CACHE_DIR": "",  # every system compiles its first step
    }
    if program == PROGRAMS[TORCHAX]:
        given["XLA_FLAGS"] = flags
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        done = subprocess.run(
            [python, str(SYSTEMS / program), *words, "--results", str(results)],
            cwd=folder,
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(results.read_text())
            return found
    lines = done.stderr.strip().splitlines() or ["no output"]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    raise RuntimeError(
        f"a system's program must run in its interpreter; {python} {program} ended with code "
        f"{done.returncode} and {last!r}. `--help` says what to install."
    )


def combined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of all runs of a system."""
    first = runs[0]
    found: dict[str, Any] = {name: first[name] for name in ("version", "torch", "losses")}
    found["first_loss_s"] = [run["first_loss_s"] for run in runs]
    for name in STEP:
        if name in first:
            found[name] = [sample for run in runs for sample in run[name]]
    if "us" in first:
        found["us"] = {name: [run["us"][name] for run in runs] for name in first["us"]}
    return found


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two losses of one step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def table_of(found: Mapping[str, Any], missing: Sequence[str], *, recipe: str) -> Table:
    """A column for each system."""
    trained, axes, _ = RECIPES[recipe]

    def row(label: str, cells: Sequence[str]) -> list[str]:
        return [label, *cells]

    versions = [of["version"] if name != OURS else "its names" for name, of in found.items()]
    rows = [row("version", versions), row("torch", [of["torch"] for of in found.values()])]
    for name, label in STEP.items():
        cells = [
            f"{statistics.median(of[name]) * 1e3:,.1f}" if name in of else "-"
            for of in found.values()
        ]
        rows.append(row(label, cells))
    ours = found[OURS]
    cells = [
        f"{statistics.median(ours['cpu_s']) / statistics.median(of['cpu_s']):.2f}"
        for of in found.values()
    ]
    rows.append(row("CPU time of a step here, in that of each", cells))
    cells = [f"{statistics.median(of['first_loss_s']):,.1f}" for of in found.values()]
    rows.append(row("model on the CPU to first loss, compiled, s", cells))
    cells = [f"{difference(of['losses'], ours['losses']):.0e}" for of in found.values()]
    rows.append(row("largest difference of losses", cells))
    mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    notes = [f"{trained}, over emulated devices of this machine as {mesh}; medians."]
    if "us" in ours:
        for name in ours["us"]:
            cells = [f"{min(of['us'][name]):,.1f}" for of in found.values()]
            rows.append(row(f"{name}, us", cells))
        notes.append(
            "Below, the best time to record one operation of 256 x 256 without gradients; "
            f"{TORCHAX} computes it at once, and its step is recorded once, by jax.jit."
        )
    if missing:
        notes.append(f"Not at hand: {', '.join(missing)}.")
    title = "One program under several systems"
    if recipe != "gpt2":
        title += f": {trained.split()[0]}"
    return Table(title, ("", *found), rows, notes)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--torch-xla", type=interpreter, metavar="PYTHON", help="an interpreter that has torch_xla"
    )
    parser.add_argument(
        "--torchax", type=interpreter, metavar="PYTHON", help="an interpreter that has torchax"
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, default="gpt2", help="what is trained (default: gpt2)"
    )
    parser.add_argument("--steps", type=whole(), default=10, help="measured steps (default: 10)")
    parser.add_argument(
        "--rounds", type=whole(), default=3, help="runs of each system (default: 3)"
    )
    args = parser.parse_args()
    has_torchax = importlib.util.find_spec("torchax") and importlib.util.find_spec("optax")
    pythons = {
        OURS: sys.executable,
        TORCH_XLA: args.torch_xla,
        TORCHAX: args.torchax or (sys.executable if has_torchax else None),
    }
    if args.recipe != "gpt2":  # the one that is written for torchax
        del pythons[TORCHAX]
    missing = [name for name, python in pythons.items() if python is None]
    present = {name: python for name, python in pythons.items() if python is not None}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in present}
    words = ["--recipe", args.recipe, "--steps", str(args.steps)]
    _, axes, file = RECIPES[args.recipe]
    with tqdm(total=args.rounds * len(present), unit="run", disable=None) as bar:
        for _ in range(args.rounds):
            for name, python in present.items():
                bar.set_description(name)
                runs[name].append(measured(python, PROGRAMS[name], words, math.prod(axes.values())))
                bar.update()
    found = {name: combined(of) for name, of in runs.items()}
    agrees = all(
        difference(of["losses"], found[OURS]["losses"]) <= MOST_DIFFERENCE for of in found.values()
    )
    table = table_of(found, missing, recipe=args.recipe)
    note = f"{verdict(agrees)}: losses differ by at most {MOST_DIFFERENCE:.0e}."
    table = Table(table.title, table.columns, table.rows, [*table.notes, note])
    data = {"axes": axes, "steps": args.steps, "systems": found}
    publish(file, table, data, folder=args.out)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
