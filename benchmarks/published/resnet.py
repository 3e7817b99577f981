"""How many more images fit when devices split the images instead of the batch?

Run: python -m benchmarks.published.resnet --help
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.published import command, plots, recipes
from benchmarks.published.figures import Figure
from benchmarks.published.report import Comparison, Picture, Section
from benchmarks.published.rows import Device, Measured, Row, Samples, Scale, Settings

NAME = "resnet"
DATA, SPATIAL = "data=4", "height=2,width=2"
PUBLISHED_BATCH, NUM_DEVICES = 512, 4
MEMORY_GIB = 32  # of a TPU v4
# What a name counts of each chip: TensorCores up to v5p.
_FOUR_CHIPS = {"v3": "v3-8", "v4": "v4-8", "v5p": "v5p-8", "v5e": "v5e-4", "v6e": "v6e-4"}


def rows(settings: Settings) -> list[Row]:
    """A search for each mesh: by data, by space, and in the full run on one device."""
    if settings.device is Device.CUDA:
        return _on_gpus(settings)
    base = "-m examples.resnet_spatial.max_batch --classes 1000 --model resnet50"
    base += f" --memory-gib {MEMORY_GIB} --folder {{run}}"
    point: dict[str, Any] = {"memory_gib": MEMORY_GIB, "topology": "", "dtype": "fp32"}
    env = {}
    if settings.topology:
        point |= {"topology": four_chips(settings.topology), "dtype": "bf16"}
        base += f" --topology {point['topology']} --dtype bf16"
    else:
        # Only memory is asked for, which LLVM's optimizations do not change.
        env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    # On the TPUs of a topology a mesh takes all devices.
    is_full = settings.scale is Scale.FULL and not settings.topology
    found = []
    for mesh in (*([""] if is_full else []), DATA, SPATIAL):
        words = [*base.split(), "--meshes", mesh]
        of = point | {"mesh": mesh}
        row = Row(
            NAME, mesh or "one device", words, searched, of, env=env, is_timed=False, weight=5.0
        )
        found.append(row)
    return found


def four_chips(topology: str) -> str:
    """The topology of four chips, as the announcement's, of the version that a name has.

    Example:
        >>> four_chips("v4-16"), four_chips("v5litepod-8"), four_chips("v6e:4x4")
        ('v4-8', 'v5e-4', 'v6e-4')
    """
    version = topology.lower().removeprefix("tpu-").split("-")[0].split(":")[0]
    aliases = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v6": "v6e"}
    return _FOUR_CHIPS[aliases.get(version, version)]


def _on_gpus(settings: Settings) -> list[Row]:
    """ResNet-50 trained on the GPUs that are there: by data, and by space where there are four."""
    quick = settings.scale is Scale.QUICK
    n = settings.num_devices
    base = "-m examples.resnet_spatial.train --dtype bf16 --eval-batches 0 --steps 20 --log-every 1"
    base += f" --batch {(64 if quick else 256) * n} --no-progress"
    base += " --log-dir {logs} --results {run}/report.json"
    meshes = ["" if n == 1 else f"data={n}", *([SPATIAL] if n == NUM_DEVICES else [])]
    found = []
    for mesh in meshes:
        words = base.split() + (["--mesh", mesh] if mesh else [])
        point = {"mesh": mesh, "devices": n}
        found.append(Row(NAME, mesh or "one device", words, recipes.trained, point, 2))
    return found


def searched(folder: Path, seconds: float) -> Samples:
    """Of a search that was run with `--folder {run}`."""
    found = recipes.read_object(folder / "max_batch.json")["found"][0]
    points = [(n, peak) for n, peak in found["points"] if peak < 2**62]
    return {
        "images": [found["batch"]],
        "images_per_device": [found["batch"] / NUM_DEVICES if found["mesh"] else found["batch"]],
        "tried_images": [n for n, _ in points],
        "tried_peak_bytes": [peak for _, peak in points],
    }


# --- What is shown --------------------------------------------------------------------------------


def section(settings: Settings, measured: Mapping[str, Measured]) -> Section:
    """The largest batches, and the memory over the batch."""
    if settings.device is Device.CUDA:
        return _section_on_gpus(measured)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (name, row) in enumerate(measured.items()):
            found = row.quantities()
            points = sorted(
                zip(found["tried_images"].samples, found["tried_peak_bytes"].samples, strict=True)
            )
            xs, ys = [n for n, _ in points], [peak / 2**30 for _, peak in points]
            axes.plot(xs, ys, label=name, color=plots.COLORS[i], marker=plots.MARKERS[i])
            axes.axvline(found["images"].median, color=plots.COLORS[i], linestyle=":", alpha=0.7)
        axes.axhline(MEMORY_GIB, color="black", linewidth=1, label=f"{MEMORY_GIB} GiB of a TPU v4")
        label = f"announcement: {PUBLISHED_BATCH} images over a 2 x 2 mesh"
        axes.axvline(PUBLISHED_BATCH, color=plots.PUBLISHED, linestyle="--", label=label)
        axes.set(xlabel="images in a step, over all devices", ylabel="peak of a device, GiB")
        axes.set(xlim=(0, None), ylim=(0, None), title="ResNet-50, 224 x 224")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    lines = [
        (
            name,
            f"{row['images'].median:,.0f}",
            f"{row['images_per_device'].median:,.1f}",
            plots.bytes_text(_bytes_per_image(row)),
            row.settings["dtype"],
        )
        for name, row in measured.items()
    ]
    where = next((row.settings["topology"] for row in measured.values()), "") or "emulated CPUs"
    return Section(
        "ResNet-50: the largest batch",
        f"The largest batch whose train step fits {MEMORY_GIB} GiB on each of four devices, found "
        f"by compiling for {where}; nothing runs.",
        ("mesh", "images in a step", "for each device", "memory of a device by image", "dtype"),
        lines,
        [
            f"{PUBLISHED_BATCH} images on a 2 x 2 spatial mesh are the activations of "
            f"{PUBLISHED_BATCH // NUM_DEVICES} on each device: each has a quarter of every image. "
            "Dotted lines: the largest batch that fits, found to within 1/32."
        ],
        _comparisons(settings, measured),
        (Picture("resnet", "The memory of a device over the batch", draw, (8.0, 4.6)),)
        if measured
        else (),
    )


def _bytes_per_image(row: Measured) -> float:
    """The slope of the memory between the smallest and the largest batch that were tried."""
    found = row.quantities()
    points = sorted(
        zip(found["tried_images"].samples, found["tried_peak_bytes"].samples, strict=True)
    )
    (few, low), (many, high) = points[0], points[-1]
    return (high - low) / (many - few)


def _comparisons(settings: Settings, measured: Mapping[str, Measured]) -> list[Comparison]:
    found = {name: row["images"].median for name, row in measured.items()}
    if SPATIAL not in found:
        return []
    where = (
        "The same memory, by compilation for that chip in bf16."
        if settings.topology
        else "Emulated CPU devices in float32, whose compiler fuses and keeps other things."
    )
    texts = [
        Comparison(
            "Largest batch over a 2 x 2 spatial mesh",
            f"{PUBLISHED_BATCH} ran on v4-8, where splitting the batch ran out of memory",
            f"{found[SPATIAL]:,.0f} fit {MEMORY_GIB} GiB",
            where + " The announcement names a batch that ran, and no largest one.",
        )
    ]
    for other, meaning in ((DATA, "the batch split over as many devices"), ("one device", "one")):
        if found.get(other):
            ratio = found[SPATIAL] / found[other]
            texts.append(
                Comparison(
                    f"Spatial batch against that of {meaning}",
                    "not stated",
                    f"{ratio:.2f} times",
                    "Four devices have four times the memory, split either way; the largest batch "
                    "differs by halos, padding of odd sizes, and what the compiler fuses.",
                )
            )
    return texts


def _section_on_gpus(measured: Mapping[str, Measured]) -> Section:
    lines = [
        (
            name,
            plots.text(row["step_s"], ",.1f", 1e3),
            plots.text(row["images_per_s"], ",.0f"),
            plots.bytes_text(row["peak_bytes"].median),
        )
        for name, row in measured.items()
    ]
    return Section(
        "ResNet-50 on GPUs",
        "ResNet-50's train step at 224 x 224 under bfloat16 autocast.",
        ("", "step, ms", "images/s", "peak of a device"),
        lines,
    )


FIGURE = Figure(NAME, rows, section)

if __name__ == "__main__":
    sys.exit(command.alone(FIGURE, __doc__))
