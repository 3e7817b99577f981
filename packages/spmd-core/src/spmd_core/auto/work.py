"""The modelled time in which a device computes its part of an operation: FLOPs, and memory."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.step_graph import Operation
from spmd_core.ops.barrier import BARRIER
from spmd_core.ops.kernels.traits import Elements

# The part of the tensors of a fused chain of operations that XLA writes to memory and reads again.
_MATERIALISED = 0.5


class Work:
    """The work of a step's operations on a mesh.

    Args:
        groups: the step.
        mesh_shape: the sizes of the mesh's axes.
        machine: the devices.
    """

    def __init__(self, groups: Groups, mesh_shape: Sequence[int], machine: Machine) -> None:
        self._groups, self._mesh_shape, self._machine = groups, tuple(mesh_shape), machine
        self._traffics: dict[int, float] = {}  # by operation

    def seconds(
        self,
        number: int,
        operation: Operation,
        axis: int,
        others: Sequence[int | None],
        options: Sequence[int],
    ) -> np.ndarray:
        """The seconds of an operation on a device.

        Args:
            number, operation: the operation.
            axis: the axis whose options these are.
            others: for each axis the factor of the operation that it splits; of `axis` any.
            options: classes of the operation's group.

        Returns:
            For each option the seconds.
        """
        parts: dict[int, int] = {}
        share = 1.0
        for other, factor in enumerate(others):
            if other != axis and factor is not None:
                share /= self._mesh_shape[other]
                parts[factor] = parts.get(factor, 1) * self._mesh_shape[other]
        n, traffic = self._mesh_shape[axis], self._traffic(number, operation)
        costs = np.zeros(len(options))
        for i, c in enumerate(options):
            split, part, factor = dict(parts), share, self._groups.factor_of(number, c)
            if factor is not None:
                split[factor] = split.get(factor, 1) * n
                part = share / n
            costs[i] = max(
                operation.flops * self._padded(operation, split) / self._machine.flops,
                traffic * part / self._machine.memory_bytes_per_s,
            )
        return costs

    def _traffic(self, number: int, operation: Operation) -> float:
        """The bytes of all devices that an operation reads and writes in memory."""
        if number not in self._traffics:
            found = 0.0
            is_barrier = operation.entry.name == BARRIER  # which moves nothing
            if operation.entry.traits.elements > Elements.PERMUTED and not is_barrier:
                sizes = [self._groups.step.tensors[t].num_bytes for t, _ in operation.dims]
                part = 1.0 if not operation.is_light else _MATERIALISED
                most = sum(sizes) if operation.entry.traits.by_item else 3 * max(sizes, default=0)
                found = part * min(sum(sizes), most)
            self._traffics[number] = found
        return self._traffics[number]

    def _padded(self, operation: Operation, parts: Mapping[int, int]) -> float:
        """The part of a product that a device computes, with matrices padded to whole tiles.

        Factors that the same tensors have are one dim of a matrix, such as batch and sequence.
        Those that all tensors have only number the matrices; one that is broadcast along such a
        factor, as a mask may be along the batch, counts as having it.
        """
        if not operation.flops:
            return 1.0
        part = 1.0
        for factors, is_in_all in operation.matrix_dims:
            whole = math.prod(operation.rule.sizes[f] for f in factors)
            local = whole / math.prod(parts.get(f, 1) for f in factors)
            if not is_in_all and whole > local:
                local = math.ceil(local / self._machine.tile) * self._machine.tile
            part *= min(1.0, local / whole)
        return part
