"""The passes over a program, in their order, with a check and a dump of the graph between them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from spmd_core.config import config
from spmd_core.program.ir import Graph
from spmd_core.program.passes.attention_layouts import attention_layouts
from spmd_core.program.passes.batch_sums import batch_sums
from spmd_core.program.passes.exact_values import exact_values
from spmd_core.program.passes.image_layouts import image_layouts
from spmd_core.program.passes.index_checks import index_checks
from spmd_core.program.passes.late_copies import late_copies
from spmd_core.program.passes.lookups import lookups
from spmd_core.program.passes.narrow_gathers import narrow_gathers
from spmd_core.program.passes.paced_gradients import paced_gradients
from spmd_core.program.passes.recorded_order import recorded_order
from spmd_core.program.passes.refined_marks import refined_marks
from spmd_core.program.passes.whole_values import whole_values
from spmd_core.program.target import Target

# It returns the graph that it got if there is nothing to change.
Pass = Callable[[Graph, Target], Graph]
PASSES: tuple[Pass, ...] = (
    # What an operation needs to know of the layouts, which are followed through what was recorded.
    index_checks,
    image_layouts,
    attention_layouts,
    lookups,
    # What moves between devices.
    batch_sums,
    narrow_gathers,
    refined_marks,
    # When it is computed.
    recorded_order,
    paced_gradients,
    late_copies,
    # What is stored.
    exact_values,
    whole_values,
)


def run(graph: Graph, target: Target, name: str) -> Graph:
    """The graph behind all passes.

    Args:
        graph: as it was recorded.
        target: what it is lowered for.
        name: the program's, which a folder of dumps has.
    """
    for number, (stage, rewritten) in enumerate(stages(graph, target)):
        graph = rewritten
        if config.dump_passes:
            _dump(graph, Path(config.dump_passes) / name, f"{number:02}_{stage}.txt")
    return graph


def _dump(graph: Graph, folder: Path, name: str) -> None:
    """Writes the graph's text into a file of the folder, which is made. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(graph.text())
    except OSError as error:
        raise OSError(
            "config.dump_passes, or SPMD_DUMP_PASSES, is a folder that can be made and written; "
            f"got {config.dump_passes!r}: {error}. Assign another folder to config.dump_passes, "
            "or None."
        ) from error


def stages(graph: Graph, target: Target) -> Iterator[tuple[str, Graph]]:
    """The graph as it was recorded, and behind each pass that changes it, with the pass's name."""
    yield "recorded", graph
    for rewrite in PASSES:
        before, graph = graph, rewrite(graph, target)
        if graph is not before:
            if config.check_passes:
                graph.check()
            yield rewrite.__name__, graph
