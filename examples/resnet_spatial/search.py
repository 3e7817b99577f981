"""What --max-batch searches: its options."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from examples.training.knobs import KnobError

FOLDER = Path("results/resnet_spatial")
MESHES = ("", "data=4", "height=2,width=2")


@dataclass(frozen=True)
class Search:
    """What to search.

    Attributes:
        memory_gib: of a device.
        meshes: by text; empty: one device.
        folder: for max_batch.json, .md and .png.
        topology: of TPUs to compile for; empty: emulated CPU devices.
    """

    memory_gib: float
    meshes: tuple[str, ...]
    folder: Path
    topology: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --max-batch and its options."""
    parser.add_argument(
        "--max-batch",
        action="store_true",
        help=f"only find the largest batch that fits --memory-gib on each of {MESHES}",
    )
    parser.add_argument(
        "--memory-gib", type=float, default=16.0, help="memory of a device (default: 16)"
    )
    parser.add_argument(
        "--max-batch-meshes",
        nargs="+",
        default=list(MESHES),
        help="meshes of --max-batch; an empty one is one device",
    )
    parser.add_argument(
        "--max-batch-topology",
        default="",
        metavar="NAME",
        help="compile for TPUs that are not there, such as v4-8, whose devices each mesh takes all",
    )
    parser.add_argument(
        "--max-batch-folder", default=str(FOLDER), help=f"for its files (default: {FOLDER})"
    )


def search_from(values: argparse.Namespace) -> Search | None:
    """The search that the options describe; None without --max-batch."""
    if not values.max_batch:
        return None
    if values.memory_gib <= 0:
        raise KnobError(
            f"--memory-gib must be above 0; got {values.memory_gib}. Pass for instance 16."
        )
    return Search(
        values.memory_gib,
        tuple(values.max_batch_meshes),
        Path(values.max_batch_folder),
        values.max_batch_topology,
    )
