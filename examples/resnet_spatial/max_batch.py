"""Finds the largest batch that fits the memory of a device, by compiling train steps: none runs.

    python -m examples.resnet_spatial.max_batch --memory-gib 16
        ResNet-50 on one device, on four by data, and on four by space, with a table and a curve

The compiler knows the peak memory of a program that it has compiled. A batch's peak is nearly a
straight line over its size, so two small batches predict the largest one, and compiling around the
prediction confirms it. The search of each mesh has a process of its own, with the mesh's devices.
"""

from examples.resnet_spatial.search import Search, search_from, sizes_of
from examples.training.knobs import begin_command

if __name__ == "__main__":
    # Before the imports below, which take seconds.
    begin_command(lambda: search_from(None, usage=__doc__))

import spmd_core as spmd  # before torchvision: see spmd_core.torch_backend.torchvision_ops

# isort: split
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from examples.resnet_spatial import shardings
from examples.resnet_spatial.config import TrainConfig
from examples.resnet_spatial.model import build_model
from examples.resnet_spatial.resolve import num_classes, parsed_mesh
from examples.training.command import exit_code
from examples.training.log import console
from spmd_core import files

GIB = 2**30
# The largest relative distance of the found batch from one that does not fit.
PRECISION = 1 / 32


class CompileError(RuntimeError):
    """A batch did not compile."""


@dataclass(frozen=True)
class Found:
    """What was found for a mesh.

    Attributes:
        mesh: as text.
        batch: the most images in a step, over all devices; 0 if none fit.
        share: parts of the batch; a device has a part of each of `batch / share` images.
        points: (images, bytes of a device's peak) of all compilations.
    """

    mesh: str
    batch: int
    share: int
    points: list[tuple[int, int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code (see `exit_code`)."""
    return exit_code(lambda: run(search_from(argv, usage=__doc__)), failed=(CompileError,))


def run(search: Search) -> None:
    """Searches every mesh, prints a table, and writes it with the curve.

    Raises:
        KnobError: a mesh cannot work.
        CompileError: a batch did not compile.
    """
    limit = int(search.memory_gib * GIB)
    found = []
    for mesh in search.meshes:
        sizes = sizes_of(mesh)
        share = sizes.get("data", 1)
        of = dataclasses.replace(search.config, mesh=mesh)
        batch, points = _in_process(of, search.topology, limit, share)
        found.append(Found(mesh, batch, share, sorted(points.items())))
        print(f"{mesh or 'one device'}: {batch} images", flush=True)
    _publish(search, found)


def largest(
    peak: Callable[[int], int], limit: int, *, multiple: int, first: int
) -> tuple[int, dict[int, int]]:
    """The largest multiple whose peak is at most the limit, to within `PRECISION`.

    Returns:
        The batch, 0 if none fits, and the peaks of all batches that were tried.
    """
    points: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in points:
            points[batch] = peak(batch)
        return points[batch] <= limit

    low, high = 0, 0  # the largest known to fit, the smallest known not to
    guess = first
    while True:
        if fits(guess):
            low = max(low, guess)
        else:
            high = min(high or guess, guess)
        step = max(multiple, int(low * PRECISION) // multiple * multiple)
        if high and high - low <= step:
            return low, points
        if high == multiple:
            return 0, points
        guess = _next_guess(points, limit, low, high, step, multiple)


def _next_guess(
    points: dict[int, int], limit: int, low: int, high: int, step: int, multiple: int
) -> int:
    """A batch between the two, by the straight line through the two batches nearest the limit.

    Between two bounds, every second guess is the middle: the line may be wrong.
    """
    if low and high and len(points) > 4 and len(points) % 2:
        return (low + high) // 2 // multiple * multiple
    if len(points) < 2:
        return max(multiple, (low * 16 if low else high // 2) // multiple * multiple)
    (a, at_a), (b, at_b) = sorted(points.items(), key=lambda point: abs(point[1] - limit))[:2]
    slope = max((at_b - at_a) / (b - a), 1.0)
    line = int(a + (limit - at_a) / slope) // multiple * multiple
    # Inside of what is not known yet. Where the line says that a bound is right to within a step, a
    # step from it, which ends the search.
    if low and line < low + step:
        line = low + step
    if high and line > high - step:
        line = high - step
    upper = high - multiple if high else 2**31
    return min(max(line, low + multiple), upper)


# --- The compilations -----------------------------------------------------------------------------


DOES_NOT_FIT = 2**62  # for a step whose compiler gives up


def compiled_peak(config: TrainConfig) -> int:
    """Bytes of a device's peak in a train step, compiled for emulated devices and not run."""
    _record_step(config, end=spmd.debugging.hlo)  # compiles what is pending, as a sync would
    return spmd.metrics.programs()[-1].peak_bytes


def planned_peak(config: TrainConfig, topology: str) -> int:
    """The same, of a device of TPUs that are not there; `DOES_NOT_FIT` if their compiler gives up.

    It recomputes when memory is short: near the limit, the peak only says that the step fits.
    """
    made = spmd.plan(lambda: _record_step(config, end=spmd.sync), topology=topology)
    return made.peak_bytes or DOES_NOT_FIT


def _record_step(config: TrainConfig, *, end: Callable[[], object]) -> None:
    """Records a train step of a new model, whose optimizer has its state, and ends it.

    Operations that `end` does not compute are dropped with the model.
    """
    spmd.use_spmd()
    mesh = parsed_mesh(config)
    model = build_model(config.model, num_classes=num_classes(config)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    images = torch.empty(config.batch, 3, config.image_size, config.image_size).to("xla")
    labels = torch.zeros(config.batch, dtype=torch.int64).to("xla")
    if mesh:
        shardings.replicate([model], mesh)
        sharding = shardings.batch_sharding(mesh)
        spmd.mark_sharding(images, mesh, sharding.partition_spec)
        spmd.mark_sharding(labels, mesh, sharding.partition_spec[:1])
    spmd.sync()  # the momentum's zeros
    with torch.autocast("xla", dtype=torch.bfloat16, enabled=config.dtype == "bf16"):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del logits
    end()


_CHILD = """
import sys
from examples.resnet_spatial import max_batch
max_batch._search_here(sys.argv[1])
"""


def _in_process(
    config: TrainConfig, topology: str, limit: int, multiple: int
) -> tuple[int, dict[int, int]]:
    """`largest` for the mesh of a configuration, in a new process."""
    values = json.dumps([dataclasses.asdict(config), topology, limit, multiple])
    command = [sys.executable, "-c", _CHILD, values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"a train step of each batch must compile; got exit code {done.returncode} on "
            f"{config.mesh or 'one device'}: {done.stderr[-500:]}. Try another model or "
            "--image-size."
        )
    batch, points = json.loads(done.stdout.splitlines()[-1])
    return batch, {int(n): peak for n, peak in points.items()}


def _search_here(values: str) -> None:
    """The search that `_in_process` started; prints its result."""
    fields, topology, limit, multiple = json.loads(values)
    config = TrainConfig(**fields)
    if not topology:
        spmd.config.cache_dir = None
        spmd.simulate(math.prod(sizes_of(config.mesh).values()))

    def peak(batch: int) -> int:
        print(f"{batch} images", file=sys.stderr, flush=True)  # for when the system ends this
        of = dataclasses.replace(config, batch=batch)
        try:
            return planned_peak(of, topology) if topology else compiled_peak(of)
        except Exception as error:
            raise CompileError(f"{batch} images: {error}") from error

    print(json.dumps(largest(peak, limit, multiple=multiple, first=8 * multiple)))


# --- Results --------------------------------------------------------------------------------------


def _publish(search: Search, found: list[Found]) -> None:
    config = search.config
    columns = ["mesh", "images in a step", "images that a device has a part of", "times unsplit"]
    unsplit = next((f.batch for f in found if not f.mesh), 0)
    rows = [
        [
            f.mesh or "one device",
            f"{f.batch:,}",
            f"{f.batch // f.share:,}",
            f"{f.batch / unsplit:.2f}" if unsplit else "-",
        ]
        for f in found
    ]
    title = (
        f"{config.model}, {config.image_size} x {config.image_size}, {config.dtype}: the largest "
        f"batch in {search.memory_gib:g} GiB"
    )
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console().print(table)
    search.folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"memory_gib": search.memory_gib, "topology": search.topology}
    data |= {"config": dataclasses.asdict(config), "found": [dataclasses.asdict(f) for f in found]}
    files.write_text(search.folder / "max_batch.json", json.dumps(data, indent=1) + "\n")
    lines = [f"# {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    files.write_text(search.folder / "max_batch.md", "\n".join(lines) + "\n")
    curves = {
        f.mesh or "one device": [(batch, peak / GIB) for batch, peak in f.points] for f in found
    }
    _memory_curves(
        search.folder / "max_batch.png", curves, limit_gib=search.memory_gib, title=title
    )
    print(f"written: {search.folder / 'max_batch'}.json, .md and .png")


def _memory_curves(
    path: Path, points: Mapping[str, Sequence[tuple[int, float]]], *, limit_gib: float, title: str
) -> None:
    """Writes an image of a device's memory over the batch, a line for each mesh.

    Args:
        path: of the image.
        points: by the mesh's name, (images in a step, GiB of a device).
        limit_gib: drawn across.
        title: above.
    """
    import matplotlib  # noqa: PLC0415  (slow to import, and only this picture needs it)

    matplotlib.use("Agg")  # files only: there may be no display
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, curves = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for name, found in points.items():
        batches, memory = zip(*sorted(found))
        (line,) = curves.plot(batches, memory, marker="o", label=name)
        fitting = [b for b, gib in found if gib <= limit_gib]
        if fitting:
            curves.axvline(max(fitting), color=line.get_color(), linestyle=":")
            curves.annotate(
                f"{max(fitting)}", (max(fitting), 0), color=line.get_color(), ha="right"
            )
    curves.axhline(limit_gib, color="black", linestyle="--", label=f"{limit_gib:g} GiB")
    curves.set(
        xlabel="images in a step, over all devices",
        ylabel="peak memory of a device, GiB",
        title=title,
        ylim=(0, 1.6 * limit_gib),
        xlim=(0, None),
    )
    curves.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
