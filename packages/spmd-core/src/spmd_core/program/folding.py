"""Whether the layers that programs repeat become loops: `config.fold_layers`, and what "auto" does.

"auto" makes loops where those that are found took neither more time nor more memory than layers one
by one, as benchmarks/folded_steps.py measures it, and elsewhere none. A loop reads each layer's
weights out of a stack. On CPUs that copies them, which costs nothing where devices gather them from
each other in any case, as with FSDP.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spmd_core.config import config
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Value
from spmd_core.program import automatic
from spmd_core.program.program_graph import Leaf
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh


class Choice(NamedTuple):
    """What "auto" does on a platform.

    Attributes:
        folds_gathered: whether layers become loops in programs whose devices gather most of their
            weights; those of other programs stay one by one.
        reason: why, in words.
    """

    folds_gathered: bool
    reason: str


_BY_PLATFORM = {
    "cpu": Choice(
        True,
        "where devices gather the weights of layers, steps of loops took at most 1.02 of the time "
        "of layers one by one there, elsewhere up to 1.23",
    ),
    "tpu": Choice(False, "the time of a step has not been measured there"),
}
_spec, _placement = operator.attrgetter("spec"), operator.attrgetter("placement")
# Operations of a program that takes seconds to compile.
_MANY = 256
_ELSEWHERE = Choice(False, "neither time nor memory has been measured there")


def choice(platform: str) -> Choice:
    """What "auto" does on a platform, such as "cpu"."""
    return _BY_PLATFORM.get(platform, _ELSEWHERE)


def folds_layers(leaves: Sequence[Value | Leaf]) -> bool:
    """Whether repeated layers become loops in a program that is recorded now, with these inputs."""
    if config.fold_layers == "auto" and automatic.search is not None:
        return automatic.search.folds_layers
    return folds_placed(leaves)


def folds_placed(leaves: Sequence[Value | Leaf]) -> bool:
    """Whether repeated layers become loops in a program whose inputs lie as these do."""
    if config.fold_layers != "auto":
        return bool(config.fold_layers)
    return choice(devices.platform()).folds_gathered and gathers_weights(leaves)


def gathers_weights(leaves: Sequence[Value | Leaf]) -> bool:
    """Whether axes that split a program's data also split most of its weights, by elements.

    Matrices of floats count as weights, and integers, of which the first dim is the batch, and
    floats of more dims as data.
    """
    batch: set[tuple[Mesh, int]] = set()
    weights: dict[frozenset[tuple[Mesh, int]], int] = {}
    # A cut has hundreds of inputs, of few kinds, and asks in each step.
    kinds = Counter(zip(map(_spec, leaves), map(_placement, leaves)))
    for (spec, placement), count in kinds.items():
        split = _split(placement)
        if spec.dtype.is_floating_point and len(spec.shape) == 2:
            axes = frozenset[tuple[Mesh, int]]().union(*split)
            weights[axes] = weights.get(axes, 0) + count * spec.num_elements
        elif split and (len(spec.shape) > 2 or not spec.dtype.is_floating_point):
            batch |= split[0]
    gathered = sum(n for axes, n in weights.items() if not axes.isdisjoint(batch))
    return 2 * gathered > sum(weights.values())


def _split(placement: Placement) -> list[set[tuple[Mesh, int]]]:
    """The axes that split each dim; empty without a mark."""
    if placement.sharding is None:
        return []
    mesh = placement.sharding.mesh
    return [
        {(mesh, axis) for axis in axes if mesh.mesh_shape[axis] > 1}
        for axes in placement.sharding.dims
    ]


def explained(num_ops: int, *, folds: bool) -> str:
    """What "auto" has chosen for a program, and why; empty for another setting.

    Also empty for a program that has no loops and compiles quickly.

    Args:
        num_ops: the number of its operations.
        folds: whether its repeated layers become loops.
    """
    if config.fold_layers != "auto" or (num_ops < _MANY and not folds):
        return ""
    platform = devices.platform()
    what = "makes loops of repeated layers" if folds else "leaves layers one by one"
    reason = choice(platform).reason
    return f'spmd.config.fold_layers = "auto" {what} in this program on {platform}: {reason}.'
