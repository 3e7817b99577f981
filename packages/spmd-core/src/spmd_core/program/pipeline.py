"""Runs the passes over a program in order; checks and dumps the graph between them."""

from collections.abc import Callable, Iterator
from pathlib import Path

from spmd_core.config import config
from spmd_core.program.ir import Graph, Op, Rewriter
from spmd_core.program.passes.attention_layouts import attention_layouts
from spmd_core.program.passes.batch_sums import batch_sums
from spmd_core.program.passes.class_orders import class_orders
from spmd_core.program.passes.column_gathers import column_gathers
from spmd_core.program.passes.costly_values import costly_values
from spmd_core.program.passes.exact_values import exact_values
from spmd_core.program.passes.folded_layers import folded_layers
from spmd_core.program.passes.fused_projections import fused_projections
from spmd_core.program.passes.image_layouts import image_layouts
from spmd_core.program.passes.index_checks import index_checks
from spmd_core.program.passes.late_copies import late_copies
from spmd_core.program.passes.local_sorts import local_sorts
from spmd_core.program.passes.lookups import lookups
from spmd_core.program.passes.narrow_gathers import narrow_gathers
from spmd_core.program.passes.paced_gradients import paced_gradients
from spmd_core.program.passes.recorded_order import recorded_order
from spmd_core.program.passes.refined_marks import refined_marks
from spmd_core.program.passes.replicated_values import replicated_values
from spmd_core.program.passes.row_writes import row_writes
from spmd_core.program.passes.stacked_operations import stacked_operations
from spmd_core.program.passes.stored_results import stored_results
from spmd_core.program.passes.transposed_weights import transposed_weights
from spmd_core.program.passes.whole_gathers import whole_gathers
from spmd_core.program.target import Target

# A pass returns the graph that it got if there is nothing to change.
Pass = Callable[[Graph, Target], Graph]
PASSES: tuple[Pass, ...] = (
    # What stays on the device, of which loops below have a layer's part.
    local_sorts,
    # Loops in place of what is repeated.
    folded_layers,
    # Alike operations on the rows of stacks, which are one from here on.
    stacked_operations,
    # Hints: what a lowering needs to know of layouts, which are propagated through the graph.
    index_checks,
    image_layouts,
    attention_layouts,
    lookups,
    # Writes to rows of stacks in place.
    row_writes,
    # Communication: what moves between devices.
    batch_sums,
    narrow_gathers,
    refined_marks,
    fused_projections,
    column_gathers,
    whole_gathers,
    # Order: when values are computed.
    recorded_order,
    paced_gradients,
    late_copies,
    # Materialisation: what is stored.
    class_orders,
    transposed_weights,
    costly_values,
    stored_results,
    exact_values,
    replicated_values,
)


def run(graph: Graph, target: Target, name: str) -> Graph:
    """The graph after all passes.

    Args:
        graph: the recorded graph.
        target: what it is lowered for.
        name: the program's name, which its folder of dumps gets.
    """
    for number, (stage, rewritten) in enumerate(stages(graph, target)):
        graph = rewritten
        if config.dump_passes:
            _dump(graph, Path(config.dump_passes) / name, f"{number:02}_{stage}.txt")
    return graph


def _dump(graph: Graph, folder: Path, name: str) -> None:
    """Writes the graph's text into a file of the folder, which is created. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(graph.text())
    except OSError as error:
        raise OSError(
            "spmd.config.dump_passes, or SPMD_DUMP_PASSES, is a folder that can be created and "
            f"written to; got {config.dump_passes!r}: {error}. Assign another folder to "
            "spmd.config.dump_passes, or None."
        ) from error


def stages(graph: Graph, target: Target) -> Iterator[tuple[str, Graph]]:
    """The recorded graph, then the graph after each pass that changes it, with the pass's name."""
    yield "recorded", graph
    for rewrite in PASSES:
        before, graph = graph, _everywhere(rewrite, graph, target)
        if graph is not before:
            if config.check_passes:
                graph.check()
            yield rewrite.__name__, graph


def _everywhere(rewrite: Pass, graph: Graph, target: Target) -> Graph:
    """The graph behind a pass, which also rewrites the bodies that its operations run."""
    graph = rewrite(graph, target)
    if rewrite is index_checks:  # it numbers the checks of bodies, too
        return graph
    bodies: dict[Op, tuple[Graph, ...]] = {}
    for op in graph.ops:
        if not op.bodies:
            continue
        rewritten = tuple(_everywhere(rewrite, body, target) for body in op.bodies)
        if any(new is not old for new, old in zip(rewritten, op.bodies)):
            bodies[op] = rewritten
    if not bodies:
        return graph
    rewriter = Rewriter(graph)
    for op in graph.ops:
        rewriter.keep(op, bodies=bodies.get(op))
    return rewriter.graph()
