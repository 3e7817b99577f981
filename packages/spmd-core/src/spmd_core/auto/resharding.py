"""The modelled collectives that bring a tensor from one layout to another, over all axes at once.

A device moves less along one axis if another one splits the tensor, too; but where it is gathered
over both, one of them moves all of it. So axes cannot be counted each by itself.

The costs of ring algorithms on n devices, for `b` bytes of the whole along the axis: an all-gather
and a reduce-scatter send b (n-1)/n, an all-reduce twice as much, an all-to-all b (n-1)/n**2 (Thakur
et al., "Optimization of Collective Communication Operations in MPICH", 2005).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from spmd_core.auto.machine import Machine


class Partial(Enum):
    """What an axis holds that splits no dim: parts of a sum over its devices."""

    SUM = "sum"


# What an axis does to a tensor: the dim that it splits, nothing, or parts of its sum.
Held = int | None | Partial


@dataclass(frozen=True)
class Resharding:
    """The costs of changes of layouts on one mesh.

    Attributes:
        mesh_shape: the sizes of the axes.
        crossing: which of them cross slices.
        machine: the devices.
    """

    mesh_shape: tuple[int, ...]
    crossing: tuple[bool, ...]
    machine: Machine

    def seconds(
        self,
        num_bytes: float,
        shape: Sequence[int],
        source: Sequence[Held],
        target: Sequence[Held],
    ) -> float:
        """The seconds of all collectives.

        What makes the parts of devices smaller comes first: dims that are split without a
        collective, and sums that are scattered; and last what makes them larger, gathers.

        Args:
            num_bytes: of the whole tensor.
            shape: of the whole tensor.
            source, target: what each axis splits before and afterwards. What becomes a part of a
                sum that is not reduced yet is added to it.
        """
        if source == target:
            return 0.0
        kinds: dict[str, list[int]] = {"slice": [], "scatter": [], "sum": [], "exchange": []}
        kinds["gather"] = []
        local, total = num_bytes, 0.0
        for axis, (before, after) in enumerate(zip(source, target)):
            if before is not None and before is not Partial.SUM:
                local /= self.mesh_shape[axis]
            if before == after or after is Partial.SUM:
                continue
            if before is Partial.SUM:
                kinds["sum" if after is None else "scatter"].append(axis)
            elif before is None:
                kinds["slice"].append(axis)
            else:
                kinds["gather" if after is None else "exchange"].append(axis)
        local /= self._size(kinds["slice"])
        if axes := kinds["scatter"]:
            inner = self._is_inner(shape, [target[a] for a in axes])
            total += self.gather(axes, local, inner=inner) * self.machine.scatters
            local /= self._size(axes)
        if axes := kinds["sum"]:
            total += self.all_reduce(axes, local)
        if axes := kinds["exchange"]:
            n = self._size(axes)
            total += self.transfer(axes, local * (n - 1) / n)
        if axes := kinds["gather"]:
            inner = self._is_inner(shape, [source[a] for a in axes])
            total += self.gather(axes, local * self._size(axes), inner=inner)
        return total

    def gather(self, axes: Sequence[int], num_bytes: float, *, inner: bool) -> float:
        """The seconds of an all-gather, or a reduce-scatter.

        Args:
            axes: the axes.
            num_bytes: of the whole along the axes.
            inner: whether it is along an inner dim, where parts are put in order, too.
        """
        n = self._size(axes)
        order = 2 * num_bytes / self.machine.memory_bytes_per_s if inner else 0.0
        return self.transfer(axes, num_bytes * (n - 1) / n) + order

    def all_reduce(self, axes: Sequence[int], num_bytes: float) -> float:
        """The seconds of an all-reduce."""
        n = self._size(axes)
        return self.transfer(axes, 2 * num_bytes * (n - 1) / n)

    def transfer(self, axes: Sequence[int], sent: float) -> float:
        """The seconds in which a device sends bytes along axes, in one collective."""
        bandwidth = self.machine.bandwidth(crosses=any(self.crossing[a] for a in axes))
        return sent / bandwidth + self.machine.latency_s

    def _size(self, axes: Sequence[int]) -> int:
        return math.prod(self.mesh_shape[a] for a in axes)

    @staticmethod
    def _is_inner(shape: Sequence[int], dims: Sequence[Held]) -> bool:
        return any(isinstance(d, int) and math.prod(shape[:d]) > 1 for d in dims)
