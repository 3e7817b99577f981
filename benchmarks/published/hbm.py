"""How much memory does GPT-2's train step take of a device, over four sizes and by sharding?

Run: python -m benchmarks.published.hbm --help
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import hbm as by_compilation
from benchmarks import memory_bound
from benchmarks.published import command, plots, recipes
from benchmarks.published.figures import Figure
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Measured, Quantity, Row, Scale, Settings
from examples.gpt2.presets import PRESETS, padded_vocab

NAME = "hbm"
UNSHARDED = "unsharded"
# What the announcement measured kept every activation.
KEPT = "unsharded, nothing recomputed"
PUBLISHED_SIZES, SMALL_SIZES = ("0.5B", "1B", "2B", "4B"), ("smoke", "tiny", "small", "124M")
PUBLISHED_BYTES, PUBLISHED_PRESET = 26e9, "2B"


def shardings(settings: Settings, num_devices: int) -> dict[str, str]:
    """Meshes by name, of those that as many devices can have."""
    if not settings.topology:
        found = {UNSHARDED: "", "fsdp=4": "fsdp=4", "fsdp=2,tensor=2": "fsdp=2,tensor=2"}
        if settings.scale is Scale.FULL:
            found |= {"fsdp=8": "fsdp=8", "fsdp=16": "fsdp=16"}
        return found
    sizes = [n for n in (4, 8, 16) if n <= num_devices]
    found = {UNSHARDED: "", **{f"fsdp={n}": f"fsdp={n}" for n in sizes}}
    if num_devices >= 4:
        half = min(num_devices, 8) // 2
        found[f"fsdp={half},tensor=2"] = f"fsdp={half},tensor=2"
    return found


def rows(settings: Settings) -> list[Row]:
    """A plan for each preset and sharding: compiled, and not run."""
    num_devices = _num_chips(settings.topology) if settings.topology else 0
    found = []
    small = SMALL_SIZES[1:-1] if settings.scale is Scale.QUICK else SMALL_SIZES
    for preset in PUBLISHED_SIZES if settings.topology else small:
        for name, mesh in shardings(settings, num_devices).items():
            found.append(_row(settings, preset, name, mesh, num_devices, remat="full"))
    if settings.topology:
        found.append(_row(settings, PUBLISHED_PRESET, KEPT, "", num_devices, remat="none"))
    return found


def _row(
    settings: Settings, preset: str, name: str, mesh: str, num_devices: int, *, remat: str
) -> Row:
    axes = {axis: int(n) for axis, n in (part.split("=") for part in mesh.split(",") if part)}
    size, shards = math.prod(axes.values()), axes.get("fsdp", 1)
    topology = settings.topology or f"cpu-{size}"
    # One sequence on each shard of the batch, so that only the state is shared out.
    words = f"-m spmd_core.plan --topology {topology} --steps 1 --json {{run}}/plan.json"
    words += f" -- python -m examples.gpt2.train --preset {preset} --batch {shards} --remat {remat}"
    words += " --eval-batches 0 --max-mb 1 --no-progress"
    words += f" --mesh {mesh}" if mesh else ""
    if settings.topology:
        words += " --dtype bf16"
        words += f" --mesh-devices {size}" if mesh and size < num_devices else ""
    # Only memory is asked for, which LLVM's optimizations do not change.
    env = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    if settings.topology:
        env = by_compilation.with_arguments(by_compilation.ALIGNED)
    point = {"preset": preset, "mesh": mesh, "devices": size, "remat": remat}
    point |= {"topology": topology, "sharding": name, "fsdp": shards}
    # 1: the plan says that the step does not fit.
    return Row(
        NAME,
        f"{preset}, {name}",
        words.split(),
        recipes.planned,
        point,
        1,
        (0, 1),
        env,
        is_timed=False,
    )


def _num_chips(topology: str) -> int:
    # Slow to import, and only --topology needs it.
    from spmd_core.planner.topology_names import parse  # noqa: PLC0415

    return parse(topology).num_chips


def num_params(preset: str) -> int:
    """Parameters, with the vocabulary as the recipe pads it."""
    model = PRESETS[preset]
    return model.num_params(padded_vocab(model.vocab_size, 128))


# --- What is shown --------------------------------------------------------------------------------


def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
    """The peak over the sizes, by sharding, with the lower bounds."""
    by_sharding: dict[str, list[Measured]] = {}
    for row in measured.values():
        by_sharding.setdefault(row.settings["sharding"], []).append(row)

    def draw(figure: Any) -> None:
        axes, over = figure.subplots(1, 2, width_ratios=(3, 2))
        fitting = {
            name: [
                (num_params(row.settings["preset"]), row["peak_bytes"]) for row in of if _fits(row)
            ]
            for name, of in by_sharding.items()
        }
        plots.curves(axes, fitting, scale=1e-9)
        for i, of in enumerate(by_sharding.values()):
            least = sorted((num_params(r.settings["preset"]), bound_bytes(r) / 1e9) for r in of)
            color = plots.COLORS[i % len(plots.COLORS)]
            axes.plot(*zip(*least, strict=True), ":", color=color, alpha=0.8)
        axes.plot([], [], ":", color="gray", label="lower bound")
        if (
            settings.topology
        ):  # beside the memory of another kind of device, it would be meaningless
            label = "announcement: 2B unsharded, TPU v4, 26 GB"
            plots.published(axes, num_params(PUBLISHED_PRESET), PUBLISHED_BYTES / 1e9, label)
        axes.set(xlabel="parameters", ylabel="peak of a device, GB", xscale="log", yscale="log")
        axes.legend(fontsize=8)
        # Over so many decades the peaks would lie on their bounds, so the difference has a plot of
        # its own.
        plots.curves(over, {name: _over_bound(of) for name, of in by_sharding.items()})
        over.axhline(1, linestyle=":", color="gray")
        over.set(xlabel="parameters", ylabel="peak over lower bound", xscale="log")
        for panel in (axes, over):
            panel.grid(alpha=0.3)
        figure.suptitle("GPT-2: peak memory of a train step")

    lines = [
        (
            row.settings["preset"],
            row.settings["sharding"],
            _peak(row),
            plots.bytes_text(bound_bytes(row)),
            f"{row['peak_bytes'].median / bound_bytes(row):.2f}" if _fits(row) else "-",
        )
        for row in measured.values()
    ]
    where = settings.topology or "emulated CPU devices"
    return Section(
        "GPT-2: peak memory",
        f"The peak of one device in a train step, by compilation for {where}; nothing runs.",
        ("preset", "", "peak of a device", "lower bound", "ratio"),
        lines,
        [
            "One sequence on each shard of the batch; each block is computed again in backward, "
            f"where not said otherwise. {_BOUND if settings.topology else _STATE}"
        ],
        _comparisons(settings, measured),
        (Picture("hbm", "Peak memory of a device over model sizes", draw, (11.0, 4.6)),)
        if measured
        else (),
    )


def _over_bound(rows: Sequence[Measured]) -> list[plots.Point]:
    """Peaks over their lower bounds, of what fits, by the number of parameters."""
    return [
        (
            num_params(row.settings["preset"]),
            Quantity([row["peak_bytes"].median / bound_bytes(row)], is_measured=False),
        )
        for row in rows
        if _fits(row)
    ]


def bound_bytes(row: Measured) -> float:
    """What no program of this step can go below, on each device.

    On TPUs, the bound of `memory_bound.py`, which is of bfloat16 autocast with every block computed
    again. For emulated devices in float32, and where everything is kept, the state alone.
    """
    point = row.settings
    if point["topology"].startswith("cpu") or point["remat"] != "full":
        return memory_bound.STATE_BYTES * num_params(point["preset"]) / point["devices"]
    fsdp = point["fsdp"]
    preset, tensor = PRESETS[point["preset"]], point["devices"] // fsdp
    return memory_bound.bound(preset, fsdp=fsdp, tensor=tensor).total


_STATE = (
    f"The bound is the state alone, {memory_bound.STATE_BYTES} bytes a parameter, split over the "
    "mesh: float32 parameters and AdamW's two moments. Activations come on top."
)
_BOUND = (
    "The bound is `benchmarks/memory_bound.py`'s: state, gradients, block inputs and what a "
    f"block needs. Compiled with LIBTPU_INIT_ARGS={by_compilation.ALIGNED}; `benchmarks/hbm.py` "
    "compares with libtpu's own alignment, and with a hand-written jax program."
)


def _fits(row: Measured) -> bool:
    return row["fits"].median == 1


def _peak(row: Measured) -> str:
    if _fits(row):
        return plots.bytes_text(row["peak_bytes"].median)
    needed = row.median("needed_bytes")
    return "does not fit" + ("" if needed is None else f": needs {plots.bytes_text(needed)}")


def _comparisons(settings: Settings, measured: Mapping[str, Measured]) -> list[Comparison]:
    published = f"{PUBLISHED_BYTES / 1e9:.0f} GB on TPU v4"
    row = measured.get(f"{PUBLISHED_PRESET}, {KEPT}")
    if row is None:
        return [
            Comparison(
                "2B, unsharded",
                published,
                "in the plot, for these sizes",
                "Another compiler and float32; `--topology v4-16` compiles the published sizes.",
            )
        ]
    return [
        Comparison(
            "2B, unsharded, nothing recomputed",
            published,
            _peak(row),
            "One sequence of 1,024 tokens here; the announcement does not state its batch. "
            "`python -m benchmarks.reference_jax_gpt2 --topology v4-8 --remat none` compiles a "
            "hand-written jax program of this step.",
        )
    ]


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
