"""What a program is lowered for: a platform, a mesh, and how the program's data is split."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import jax
from jax.sharding import NamedSharding

from spmd_core.program import split_dims
from spmd_core.program.ir import Graph
from spmd_core.program.split_dims import DataSplit, Placed
from spmd_core.runtime import devices
from spmd_core.runtime.jax_sharding import CommonMesh, named_sharding, replicated
from spmd_core.sharding.sharding import Sharding


class Replicated(Enum):
    """What is replicated in a program that the partitioner makes invalid otherwise."""

    NOTHING = "nothing"
    INDICES = "the indices of its gathers and scatters"
    EVERYTHING = "all its tensors"


@dataclass(frozen=True)
class Target:
    """What the passes may ask of the program's target. No pass changes it.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        device_ids: the program's devices.
        mesh: the common mesh of its inputs, marks and results.
        replicated_part: what is replicated, whatever its marks.
        placed: the shardings of the inputs, marks and results of the recorded program.
        data_splits: how the program's data is split; see `split_dims.data_splits`.
        batch_axes: the names of the axes that split the batch, over the mesh.
    """

    platform: str
    device_ids: tuple[int, ...]
    mesh: CommonMesh
    replicated_part: Replicated
    placed: tuple[Placed, ...]
    data_splits: tuple[DataSplit, ...]

    @staticmethod
    def of(
        graph: Graph,
        *,
        replicated_part: Replicated = Replicated.NOTHING,
        platform: str | None = None,
    ) -> "Target":
        """The target of a recorded graph.

        Args:
            graph: before any pass.
            replicated_part: what is replicated, whatever its marks.
            platform: "cpu", "gpu" or "tpu"; by default the platform of the devices.
        """
        placements = [x.leaf.placement for x in graph.inputs]
        placements += [placement for placement in graph.out_placements if placement is not None]
        marks = [
            named_sharding(op.entry.sharding, graph.device_ids)
            for op in graph.all_ops()
            if op.entry.sharding is not None
        ]
        placed = [placement.device_sharding for placement in placements]
        mesh = CommonMesh([*placed, *marks], graph.device_ids)
        return Target(
            platform or devices.platform(),
            graph.device_ids,
            mesh,
            replicated_part,
            tuple(split_dims.shardings(graph)),
            tuple(split_dims.data_splits(graph)),
        )

    @property
    def is_split(self) -> bool:
        """Whether the program's values may be split over devices."""
        return len(self.device_ids) > 1 and self.replicated_part is not Replicated.EVERYTHING

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        return split_dims.batch_axes(self.data_splits, self.mesh, self.device_ids)

    @cached_property
    def split_dims(self) -> frozenset[int]:
        """The dims that the program splits, as in `registry.Context`."""
        return split_dims.split_dims(self.placed)

    @property
    def jax_mesh(self) -> jax.sharding.Mesh:
        """A mesh of all devices: the common one, if there is one."""
        mesh = self.mesh(replicated(self.device_ids)).mesh
        assert isinstance(mesh, jax.sharding.Mesh)
        return mesh

    def named(self, sharding: Sharding) -> NamedSharding:
        """A mark's sharding, over the devices of the program."""
        return named_sharding(sharding, self.device_ids)
