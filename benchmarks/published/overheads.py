"""What does it cost to record, lower, compile and send a step, to load its batch, and to start?

Run: python -m benchmarks.published.overheads --help
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.published import command, plots
from benchmarks.published.figures import Figure
from benchmarks.published.plots import text
from benchmarks.published.recipes import read_object
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Device, Measured, Row, Samples, Scale, Settings

NAME = "overheads"
RECORDING, DISPATCH, LOADER, FIRST_STEP = "recording", "dispatch", "loader", "first step"
LOADED = "0.8 of a step"  # a source of loader.py
# The operations of op_overhead.py, with torch_xla's and DTensor's published us of the same.
PUBLISHED_OPS = {"add": 2.7, "mul by a number": 4.7, "mm": 2.0, "softmax": 1.8, "layer_norm": 18.0}
PUBLISHED_OPS |= {"add_": 18.0}


def rows(settings: Settings) -> list[Row]:
    """One row for each question, and one for each depth. They measure Python, on the CPU."""
    quick = settings.scale is Scale.QUICK
    # 1: a target of the benchmark is missed; it has its figures all the same.
    codes = (0, 1)
    rounds, depths = (2, (1, 2, 4)) if quick else (3, (6, 12, 24, 48))
    pairs = "--rounds 5 --burst 0" if quick else "--rounds 20"
    few = " --rounds 3 --questions 1" if quick else ""
    preset = "smoke" if quick else "tiny"
    env = {} if settings.device is Device.EMULATED else {"JAX_PLATFORMS": "cpu"}
    chosen: list[tuple[str, str, Any, dict[str, Any], int]] = [
        (RECORDING, "op_overhead --repeats 20", recorded, {}, rounds),
        (DISPATCH, f"fixed_step {pairs}", dispatched, {}, 1),
        (LOADER, f"loader{few}", loaded, {}, 1),
        (FIRST_STEP, f"first_step --preset {preset} --rounds {rounds - 1}", first_step, {}, 1),
    ]
    for depth in depths:
        name, point = f"{depth} layers", {"layers": depth}
        chosen.append((name, f"first_trace --layers {depth}", traced, point, 1 if quick else 3))
    return [
        Row(NAME, name, f"-m benchmarks.{words} --out {{run}}".split(), read, point, n, codes, env)
        for name, words, read, point, n in chosen
    ]


def recorded(folder: Path, seconds: float) -> Samples:
    """Of op_overhead.py: microseconds by operation, and of one that records nothing."""
    found = read_object(folder / "op_overhead.json")
    samples = {f"{name}_us": of["samples"] for name, of in found["us"].items()}
    return {"floor_us": [found["floor_us"]], **samples}


def traced(folder: Path, seconds: float) -> Samples:
    """Of first_trace.py: seconds of a first step's parts, and of recording later ones."""
    found = read_object(folder / "first_trace.json")
    names = {"first_record_s": "record_s", "lower_s": "lower_s", "compile_s": "compile_s"}
    samples: Samples = {name: [found[key]] for name, key in names.items()}
    return samples | {"record_s": found["later_record_s"], "num_ops": [found["num_ops"]]}


def dispatched(folder: Path, seconds: float) -> Samples:
    """Of fixed_step.py: what Python does for a step, and its time beside a jitted jax program."""
    found = read_object(folder / "fixed_step.json")
    pairs = zip(found["ours_s"]["wall"], found["reference_s"]["wall"], strict=True)
    return {
        "record_s": found["tracing_s"]["recording"],
        "sync_s": found["tracing_s"]["dispatch_cpu"],
        "step_s": found["ours_s"]["wall"],
        "jax_step_s": found["reference_s"]["wall"],
        "ratio": [ours / theirs for ours, theirs in pairs],
    }


def loaded(folder: Path, seconds: float) -> Samples:
    """Of loader.py: seconds of a step, and of them the wait for a batch from a slow source."""
    found = read_object(folder / "loader.json")
    waits = {}
    for name, kind in (("prefetched", LOADED), ("in_step", f"{LOADED}, read in the step")):
        of = found["kinds"][kind]
        pairs = zip(of["step_s"], of["wait_share"], strict=True)
        waits[f"{name}_stall_s"] = [step * share for step, share in pairs]
    return {"step_s": found["resident_step_s"], **waits}


def first_step(folder: Path, seconds: float) -> Samples:
    """Of first_step.py: seconds from a process's start to its first loss."""
    found = read_object(folder / "first_step.json")["seconds"]
    return {
        "imports_s": found["imports"],
        "empty_cache_s": found["empty cache: all"],
        "empty_cache_compile_s": found["empty cache: compiling"],
        "full_cache_s": found["full cache: all"],
        "full_cache_compile_s": found["full cache: compiling"],
    }


# --- What is shown --------------------------------------------------------------------------------

_LABELS = {
    (DISPATCH, "record_s"): "GPT-2's step (4 layers, 8 devices), recording, ms",
    (DISPATCH, "sync_s"): "the same, ending the step, CPU time, ms",
    (DISPATCH, "ratio"): "the same step against one jitted jax program, wall time",
    (LOADER, "step_s"): "a step on a batch that is on the devices, ms",
    (LOADER, "prefetched_stall_s"): "its wait for a source that takes 0.8 of a step, ms",
    (LOADER, "in_step_stall_s"): "the same, read in the step, ms",
    (FIRST_STEP, "imports_s"): "start to first loss: imports, s",
    (FIRST_STEP, "empty_cache_s"): "start to first loss, in all, empty cache, s",
    (FIRST_STEP, "empty_cache_compile_s"): "of it compiling, s",
    (FIRST_STEP, "full_cache_s"): "start to first loss, in all, full cache, s",
    (FIRST_STEP, "full_cache_compile_s"): "of it reading programs, s",
}


def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
    """A table of all costs, and plots of recording by operation and of a first step by depth."""
    by_depth = {name: row for name, row in measured.items() if "layers" in row.settings}

    def draw(figure: Any) -> None:
        ops, depth, start = figure.subplots(1, 3)
        if RECORDING in measured:
            found = measured[RECORDING].quantities()
            plots.bars(ops, {name.removesuffix("_us"): q for name, q in found.items()})
            names = [name for name in PUBLISHED_OPS if f"{name}_us" in found]
            ops.plot(
                [PUBLISHED_OPS[name] for name in names],
                names,
                "*",
                color=plots.PUBLISHED,
                markersize=12,
                label="torch_xla, published",
            )
            ops.legend(fontsize=8)
        ops.set(xlabel="us for one operation", title="Recording")
        parts = {"first_record_s": "recording", "lower_s": "lowering", "compile_s": "XLA"}
        series = {
            label: [(row.settings["layers"], row[name]) for row in by_depth.values()]
            for name, label in parts.items()
        }
        plots.curves(depth, series)
        depth.set(xlabel="layers of GPT-2", ylabel="s", yscale="log", title="A first step")
        depths = [row.settings["layers"] for row in by_depth.values()]
        depth.set_xticks(depths, [str(layers) for layers in depths])
        depth.legend(fontsize=8)
        if FIRST_STEP in measured:
            found = measured[FIRST_STEP].quantities()
            chosen = ("imports_s", "full_cache_s", "empty_cache_s")
            labels = {name: name.removesuffix("_s").replace("_", " ") for name in chosen}
            plots.bars(start, {labels[name]: found[name] for name in chosen})
        start.set(xlabel="s", title="Start to first loss")
        for axes in (ops, depth, start):
            axes.grid(alpha=0.3)
        figure.suptitle("Overheads")

    return Section(
        "Overheads",
        "What Python and the compiler take beside the devices' work.",
        ("cost", "measured"),
        _lines(measured, by_depth),
        [
            "Recording is without gradients, after warm-up; the floor is torch's dispatch to a "
            "subclass that records nothing."
        ],
        _comparisons(measured, by_depth),
        (Picture("overheads", "Recording, first steps, and starting", draw, (14.0, 4.2)),)
        if measured
        else (),
    )


def _lines(
    measured: Mapping[str, Measured], by_depth: Mapping[str, Measured]
) -> list[tuple[str, str]]:
    lines = []
    if RECORDING in measured:
        for name, quantity in measured[RECORDING].quantities().items():
            label = name.removesuffix("_us")
            lines.append((f"recording {label}, us", text(quantity, ",.2f")))
    for (of, name), label in _LABELS.items():
        if of in measured:
            scale, form = (1e3, ",.1f") if label.endswith("ms") else (1.0, ",.2f")
            lines.append((label, text(measured[of][name], form, scale)))
    for depth, row in by_depth.items():
        model = f"GPT-2 of {depth} ({row['num_ops'].median:,.0f} operations)"
        for name, part in (
            ("first_record_s", "recording its first step, s"),
            ("record_s", "recording a later step, s"),
            ("lower_s", "lowering, s"),
            ("compile_s", "XLA's compilation, s"),
        ):
            lines.append((f"{model}: {part}", text(row[name], ",.3f")))
    return lines


def _comparisons(
    measured: Mapping[str, Measured], by_depth: Mapping[str, Measured]
) -> list[Comparison]:
    found = []
    if RECORDING in measured:
        quantities = measured[RECORDING].quantities()
        names = [name for name in PUBLISHED_OPS if f"{name}_us" in quantities]
        ours = ", ".join(f"{name} {quantities[f'{name}_us'].median:.1f}" for name in names)
        theirs = ", ".join(f"{name} {PUBLISHED_OPS[name]:g}" for name in names)
        found.append(
            Comparison(
                "Recording one operation, us",
                f"torch_xla: {theirs}; DTensor: 24 to 26; torchax, eager: 111 to 205",
                ours,
                "Other machines. torch_xla records in C++; here torch dispatches to Python, which "
                f"alone is {quantities['floor_us'].median:.1f} us.",
            )
        )
    if by_depth:
        name, row = max(by_depth.items(), key=lambda item: item[1].settings["layers"])
        found.append(
            Comparison(
                "Recording a step, ms",
                "torch_xla: 140 for a decoder of 100 layers; 24 with its cache of pure functions",
                f"{row['record_s'].median * 1e3:,.0f} for {name}, forward, backward and AdamW",
                "Another depth and another step: the published one has fewer operations a layer.",
            )
        )
    return found


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
