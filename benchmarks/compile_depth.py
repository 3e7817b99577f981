"""How do compile time, step time and memory of GPT-2 grow with its depth, one by one and as a loop?

GPT-2 of width 256 in training with AdamW over a mesh axis `fsdp`, with layers one by one
(`spmd.config.fold_layers = False`), after `spmd.scan_model(model)`, and with loops that are found
(`fold_layers = True`). The axis splits the weights and the batch. Each run is a process of its own
without a cache on disk, in turns: on emulated CPU devices, where it runs, models of few layers more
often; and compiled for TPU v4 chips that are not there, one by one in the first round alone.
Lowering and compiling is reported by the clock, beside the CPU time of the first two steps, which
has all that is compiled; a step by the CPU time of all threads, its median. With `--before`, the
first two steps are also compared, by the clock and in CPU time, with those of the same training on
the sources of another checkout: after `scan_model`, without a change of code ("by default"), and
one by one.

Run: python -m benchmarks.compile_depth
     python -m benchmarks.compile_depth --layers 4 --layers 24 --only cpu
     git worktree add --detach ../before COMMIT
     python -m benchmarks.compile_depth --before ../before
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm, trange

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--layers", type=whole(), action="append", help="depths (default 2, 4, 12, 24 and 48)"
    )
    parser.add_argument("--devices", type=whole(), default=4, help="emulated devices (default 4)")
    parser.add_argument("--rounds", type=whole(), default=1, help="turns of all runs (default 1)")
    parser.add_argument("--steps", type=whole(), default=12, help="timed steps (default 12)")
    parser.add_argument("--only", choices=("cpu", "tpu"), help="the other platform is left out")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="the root of another checkout's files, to which the first two steps of 24 layers are "
        "compared",
    )
    parser.add_argument(
        "--one",
        choices=("one by one", "as a loop", "found", "by default"),
        help="one run in this process, as a line of JSON",
    )
    args = parser.parse_args()
    if args.before and not (args.before / "packages").is_dir():
        parser.error(
            "--before is a folder with the repository's files, as `git worktree add` makes it; got "
            f"{args.before}, which has no packages/. Write --before ../before."
        )

import torch

import spmd_core as spmd
from benchmarks.published import plots
from examples.gpt2.model import build_model
from examples.gpt2.presets import ModelPreset

ROOT = Path(__file__).parents[1]
KINDS = ("one by one", "as a loop", "found")
DEFAULT = "by default"
PLATFORMS = ("cpu", "tpu")
LAYERS = (2, 4, 12, 24, 48)
TOPOLOGY = "v4-8"
# What a loop may cost: its compile time at the greatest depth against that at the depth of 4; and
# against the layers one by one, a step's time and the peak memory.
MAX_GROWTH, MAX_STEP, MAX_PEAK = 1.2, 1.02, 1.02
# What the first two steps of a model of so many layers may take, by the clock and in CPU time,
# against the same where each of them compiled a program of its own, one by one.
FIRST_LAYERS, MAX_FIRST = 24, {DEFAULT: 0.45, "as a loop": 0.12}
CLOCKS = {"first_s": "wall time", "first_cpu_s": "CPU time"}
# A model of fewer layers runs more often on the CPU, in proportion: where a process's memory lies
# changes a step by some percent, and a short step by more.
EVEN_LAYERS = 12
PICTURE = ROOT / "docs" / "images" / "compile_depth"

WIDTH, SEQ, BATCH, VOCAB = 256, 128, 8, 2048


def build(kind: str, num_layers: int, num_devices: int) -> tuple[Any, Any]:
    """The model over the mesh, and its optimizer."""
    spmd.use_spmd()
    preset = ModelPreset("bench", num_layers, WIDTH, 4, VOCAB, SEQ, SEQ, BATCH, 1e-3)
    torch.manual_seed(0)
    model = build_model(preset, vocab_size=VOCAB, dropout=0.0).to("xla")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            spmd.mark_sharding(parameter, mesh, ("fsdp", None))
    if kind == "as a loop":
        spmd.scan_model(model)
    # Another checkout may not have the setting.
    if hasattr(spmd.config, "fold_layers") and kind in (KINDS[0], KINDS[-1]):
        spmd.config.fold_layers = kind == KINDS[-1]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: Any, tokens: torch.Tensor, *, wait: bool) -> torch.Tensor:
    """One training step."""
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    spmd.sync(wait=wait)
    return loss.detach()


def tokens_of(number: int, num_devices: int) -> torch.Tensor:
    """The batch of a step, split over the mesh."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=generator).to("xla")
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))
    spmd.mark_sharding(tokens, mesh, ("fsdp", None))
    return tokens


def on_cpu(kind: str, num_layers: int, num_devices: int, num_steps: int) -> dict[str, Any]:
    """One run on emulated devices."""
    spmd.simulate(num_devices)
    model, optimizer = build(kind, num_layers, num_devices)
    spmd.sync(wait=True)
    known = len(spmd.metrics.programs())
    wall, cpu = time.perf_counter(), time.process_time()
    losses = [step(model, optimizer, tokens_of(i, num_devices), wait=True) for i in range(2)]
    first = {"first_s": time.perf_counter() - wall, "first_cpu_s": time.process_time() - cpu}
    programs = spmd.metrics.programs()[known:]
    times = []
    for number in range(2, num_steps + 2):
        batch = tokens_of(number, num_devices)
        cpu = time.process_time()
        losses.append(step(model, optimizer, batch, wait=True))
        times.append(time.process_time() - cpu)
    largest = max(programs, key=lambda program: program.num_ops)
    return {
        **first,
        "programs": len(spmd.metrics.programs()) - known,
        "lowering_s": sum(program.trace_s for program in programs),
        "compile_s": sum(program.compile_s for program in programs),
        "step_cpu_s": statistics.median(times),
        "peak_bytes": largest.peak_bytes,
        "losses": [loss.item() for loss in losses],
    }


def on_tpu(kind: str, num_layers: int, num_devices: int) -> dict[str, Any]:
    """One run of the compiler."""

    def train() -> None:
        model, optimizer = build(kind, num_layers, num_devices)
        for number in range(4):
            step(model, optimizer, tokens_of(number, num_devices), wait=False)

    plan = spmd.plan(train, topology=TOPOLOGY)
    largest = plan.largest
    if largest is None or plan.refusals:
        raise SystemExit(f"no program: {plan}")
    return {"compile_s": largest.compile_s, "peak_bytes": largest.peak_bytes}


def run(platform: str, kind: str, num_layers: int, root: Path = ROOT) -> dict[str, Any]:
    """One run in a process of its own, on the sources of a checkout."""
    command = [sys.executable, "-P", __file__, "--one", kind, "--only", platform]
    command += ["--layers", str(num_layers), "--devices", str(args.devices)]
    command += ["--steps", str(args.steps)]
    sources = [root, *sorted((root / "packages").glob("*/src"))]
    env = {**os.environ, "SPMD_CACHE_DIR": "", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured_first(before: Path) -> dict[str, dict[str, float]]:
    """Seconds of the first two steps: before, and of each kind now, medians in turns."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in trange(args.rounds, desc="first steps", disable=None):
        now = ((kind, kind, ROOT) for kind in (KINDS[0], *MAX_FIRST))
        for name, kind, root in (("before", KINDS[0], before), *now):
            runs.setdefault(name, []).append(run("cpu", kind, FIRST_LAYERS, root.resolve()))
    return {
        name: {clock: statistics.median(x[clock] for x in of) for clock in CLOCKS}
        for name, of in runs.items()
    }


def judged_first(first: dict[str, dict[str, float]]) -> dict[str, bool]:
    """The same as `judged` of the first two steps."""
    if not first:
        return {}
    holds = {}
    for kind, most in MAX_FIRST.items():
        for clock, name in CLOCKS.items():
            own, before = first[kind][clock], first["before"][clock]
            holds[
                f"cpu: the first two steps of {FIRST_LAYERS} layers, {kind}, take {own:.1f} s of "
                f"{name}, {own / before:.3f} of the {before:.1f} s before; at most {most}"
            ] = own / before <= most
    return holds


def _one_by_one(first: dict[str, dict[str, float]]) -> list[str]:
    """What the first two steps take one by one; nothing if they were not compared."""
    if not first:
        return []
    own, before = first[KINDS[0]], first["before"]
    ratios = " and ".join(f"{own[x] / before[x]:.2f} of the {name}" for x, name in CLOCKS.items())
    return [f"cpu: one by one, the first two steps take {ratios} before."]


def measured(layers: tuple[int, ...], platforms: list[str]) -> dict[str, Any]:
    """For each platform, kind and depth the medians of all rounds."""
    turns = [
        (platform, n, kind)
        for number in range(args.rounds)
        for platform in platforms
        for n in layers
        for _ in range(max(1, EVEN_LAYERS // n) if platform == "cpu" else 1)
        for kind in KINDS
        # For TPUs it compiles for minutes.
        if platform == "cpu" or number == 0 or kind != KINDS[0]
    ]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for platform, num_layers, kind in tqdm(turns, desc="runs", disable=None):
        runs.setdefault((platform, kind, num_layers), []).append(run(platform, kind, num_layers))
    found: dict[str, Any] = {}
    for (platform, kind, num_layers), of in runs.items():
        medians = {
            key: of[0][key] if key == "losses" else statistics.median(r[key] for r in of)
            for key in of[0]
        }
        found.setdefault(platform, {}).setdefault(kind, {})[str(num_layers)] = medians
    return found


def judged(found: dict[str, Any], layers: tuple[int, ...]) -> dict[str, bool]:
    """What the figures are to reach, and whether they do."""
    holds = {}
    deepest = str(max(layers))
    for platform, kinds in found.items():
        plain, loop, found_loop = (kinds[kind] for kind in KINDS)
        if "4" in loop and deepest != "4":
            growth = _compiling(loop[deepest]) / _compiling(loop["4"])
            holds[
                f"{platform}: lowering and compiling a loop of {deepest} layers takes {growth:.2f} "
                f"of the time of 4 layers, at most {MAX_GROWTH}"
            ] = growth <= MAX_GROWTH
        peak = max(loop[n]["peak_bytes"] / plain[n]["peak_bytes"] for n in loop)
        holds[
            f"{platform}: a loop's peak memory is {peak:.3f} of that of layers one by one, at most "
            f"{MAX_PEAK}"
        ] = peak <= MAX_PEAK
        if platform == "cpu":
            time_ = max(loop[n]["step_cpu_s"] / plain[n]["step_cpu_s"] for n in loop)
            holds[
                f"{platform}: a step of a loop takes {time_:.3f} of the CPU time of one by one, at "
                f"most {MAX_STEP}"
            ] = time_ <= MAX_STEP
            worst = max(
                abs(a - b) / abs(b)
                for n in loop
                for a, b in zip(loop[n]["losses"], plain[n]["losses"])
            )
            holds[f"cpu: losses differ by at most {worst:.1e}, within 1e-5"] = worst <= 1e-5
        holds |= _judged_found(platform, found_loop, plain)
    return holds


def _judged_found(platform: str, loop: dict[str, Any], plain: dict[str, Any]) -> dict[str, bool]:
    """Whether loops that are found take no more than layers one by one."""
    peak = max(loop[n]["peak_bytes"] / plain[n]["peak_bytes"] for n in loop)
    text, is_as_good = f"{peak:.3f} of the peak memory", peak <= MAX_PEAK
    if platform == "cpu":
        time_ = max(loop[n]["step_cpu_s"] / plain[n]["step_cpu_s"] for n in loop)
        text += f" and {time_:.3f} of a step's CPU time, at most {MAX_PEAK} and {MAX_STEP}"
        is_as_good = is_as_good and time_ <= MAX_STEP
    return {f"{platform}: loops that are found take {text}": is_as_good}


def _compiling(figures: dict[str, Any]) -> float:
    return float(figures["compile_s"] + figures.get("lowering_s", 0.0))


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """The table's rows."""
    return [
        [
            platform,
            layers,
            kind,
            f"{of['lowering_s']:.2f} s" if "lowering_s" in of else "",
            f"{of['compile_s']:.2f} s",
            f"{of['first_cpu_s']:.1f} s" if "first_cpu_s" in of else "",
            f"{1e3 * of['step_cpu_s']:.0f} ms" if "step_cpu_s" in of else "",
            f"{of['peak_bytes'] / 1e6:.1f} MB",
        ]
        for platform, kinds in found.items()
        for layers in kinds[KINDS[0]]
        for kind, of in ((kind, kinds[kind][layers]) for kind in KINDS)
    ]


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Lowering and compiling against depth, a panel for each platform."""
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, (platform, kinds) in zip(panels, found.items()):
        for i, (kind, by_depth) in enumerate(kinds.items()):
            depths = [int(n) for n in by_depth]
            seconds = [_compiling(of) for of in by_depth.values()]
            panel.plot(depths, seconds, "o-", color=plots.COLORS[i], label=kind)
        devices = "emulated CPU devices" if platform == "cpu" else "for TPU v4"
        panel.set(xlabel="layers", ylabel="lowering and compiling, s", ylim=(0, None))
        panel.set(title=f"GPT-2 of width {WIDTH}, {devices}")
        panel.grid(alpha=0.3)
        panel.legend()


def main() -> int:
    layers = tuple(args.layers or LAYERS)
    if args.one:
        if args.only == "tpu":
            print(json.dumps(on_tpu(args.one, layers[0], args.devices)))
        else:
            print(json.dumps(on_cpu(args.one, layers[0], args.devices, args.steps)))
        return 0
    found = measured(layers, [args.only] if args.only else list(PLATFORMS))
    first = measured_first(args.before) if args.before else {}
    holds = {**judged(found, layers), **judged_first(first)}
    table = Table(
        "GPT-2 by depth: layers one by one, and as one loop",
        [
            "on",
            "layers",
            "called",
            "lowering",
            "compiling",
            "CPU of two steps",
            "step",
            "peak",
        ],
        rows_of(found),
        [
            f"Width {WIDTH}, {BATCH} sequences of {SEQ} tokens, AdamW, fsdp={args.devices}, which "
            "splits weights and batch; for TPUs, compiling is libtpu's for chips that are not "
            f"there. A step is CPU time of all threads, the median of {args.steps} steps; the peak "
            "is a device's.",
            *(f"{name}: {verdict(of)}" for name, of in holds.items()),
            *_one_by_one(first),
        ],
    )
    data = {"devices": args.devices, "rounds": args.rounds, "figures": found, "first": first}
    publish("compile_depth", table, data, folder=args.out)
    if not args.only:
        plots.save(lambda of: draw(of, found), PICTURE, size=(10.0, 3.8), kinds=["png"])
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
