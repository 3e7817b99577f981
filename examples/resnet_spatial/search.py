"""The options of a search for the largest batch, in plain values without a framework."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.resnet_spatial.config import SMOKE, TrainConfig, with_defaults
from examples.resnet_spatial.presets import MESH_AXES
from examples.training.choices import MESH_AUTO
from examples.training.knobs import KnobError, add_smoke, parse, parser_of
from examples.training.mesh_sizes import check_axes, mesh_sizes

FOLDER = Path("results/resnet_spatial")
MESHES = ("", "data=4", "height=2,width=2")


@dataclass(frozen=True)
class Search:
    """What to search.

    Attributes:
        config: the train step; its mesh and its batch are the search's.
        memory_gib: of a device.
        meshes: by text; empty: one device.
        folder: for max_batch.json, .md and .png.
        topology: of TPUs to compile for; empty: emulated CPU devices.
    """

    config: TrainConfig
    memory_gib: float
    meshes: tuple[str, ...]
    folder: Path
    topology: str = ""


def search_from(argv: Sequence[str] | None, *, usage: str | None = None) -> Search:
    """The command line as a search: its own options, and those of the train step.

    Args:
        argv: without the program; None: this process's.
        usage: stands on top of --help.

    Raises:
        KnobError: an option is out of range, or two options do not fit together.
    """
    parser = parser_of(TrainConfig, module="examples.resnet_spatial.max_batch", usage=usage)
    add_smoke(parser, SMOKE)
    parser.add_argument(
        "--memory-gib", type=float, default=16.0, help="memory of a device (default: 16)"
    )
    parser.add_argument(
        "--meshes", nargs="+", default=list(MESHES), help="to search; an empty one is one device"
    )
    parser.add_argument(
        "--topology",
        default="",
        metavar="NAME",
        help="compile for TPUs that are not there, such as v4-8, whose devices each mesh takes all",
    )
    parser.add_argument("--folder", default=str(FOLDER), help=f"for its files (default: {FOLDER})")
    config = with_defaults(parse(parser, TrainConfig, argv, smoke=SMOKE))
    values = parser.parse_args(argv)
    if not 0 < values.memory_gib < math.inf:
        raise KnobError(
            f"--memory-gib must be above 0; got {values.memory_gib}. Pass for instance 16."
        )
    if config.data not in ("fake", "shapes"):
        raise KnobError(
            f"the search needs no images; got --data {config.data!r}. Leave it out, and pass "
            "--classes."
        )
    if config.mesh:
        raise KnobError(
            f"--meshes names the meshes to search; got --mesh {config.mesh!r}. Pass --meshes "
            f"{config.mesh}."
        )
    for mesh in values.meshes:
        sizes_of(mesh)
    return Search(
        config, values.memory_gib, tuple(values.meshes), Path(values.folder), values.topology
    )


def sizes_of(mesh: str) -> dict[str, int]:
    """The axes of a mesh of the search, whose sizes must be numbers.

    Raises:
        KnobError: they are not, or an axis has another name.
    """
    if mesh == MESH_AUTO:
        raise KnobError(
            "--meshes names meshes whose memory is compared; got auto, which finds the fastest "
            "mesh for one batch. Name the axes, or let the planner search both: python -m "
            "spmd_core.plan --topology NAME --search batch,mesh -- python -m "
            "examples.resnet_spatial.train --batch 8."
        )
    sizes = mesh_sizes(mesh)
    check_axes(mesh, sizes, MESH_AXES)
    known = {axis: size for axis, size in sizes.items() if size is not None}
    if known != sizes:
        raise KnobError(
            f"--meshes has a number for each axis; got {mesh!r}. Write for instance "
            "height=2,width=2."
        )
    return known
