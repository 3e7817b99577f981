"""Why a tensor is sharded as it is, and what the alternatives would cost by the model."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from spmd_core.auto.costs import NONE, CostModel
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import Solution
from spmd_core.errors import AutoShardingError
from spmd_core.sharding.partition_spec import PartitionSpecLike


@dataclass(frozen=True)
class Explainer:
    """Explains the choice of a search.

    Attributes:
        model: the costs, on the mesh that was chosen.
        machine: the devices.
        solution: the choice.
        axes: the names of the mesh's axes.
        tensors: the tensors of the table, by name.
    """

    model: CostModel
    machine: Machine
    solution: Solution
    axes: tuple[str, ...]
    tensors: Mapping[str, int]

    def spec(self, tensor: int, choices: tuple[tuple[int, ...], ...]) -> PartitionSpecLike:
        """The partition spec of a tensor under these choices."""
        groups = self.model.groups
        tie = groups.tie[groups.of_tensor[tensor]]
        found: list[tuple[str, ...]] = [() for _ in groups.step.tensors[tensor].spec.shape]
        for name, choice in zip(self.axes, choices):
            dim = None if choice[tie] == NONE else groups.dim_of(tensor, choice[tie])
            if dim is not None:
                found[dim] = (*found[dim], name)
        return tuple(x if len(x) > 1 else x[0] if x else None for x in found)

    def reason(self, tensor: int) -> str:
        """What the sharding of a tensor of the table means for the operations that read it."""
        groups = self.model.groups
        step, tie = groups.step, groups.tie[groups.of_tensor[tensor]]
        words = []
        for name, choice in zip(self.axes, self.solution.choices):
            held = None if choice[tie] == NONE else groups.dim_of(tensor, choice[tie])
            if held is None:
                continue
            gathered, alike = 0, 0
            for i in self._readers(tensor):
                operation = step.operations[i]
                c = choice[groups.tie[groups.of_operation[i]]]
                for t, dims in operation.dims:
                    if groups.of_tensor[t] != groups.of_tensor[tensor]:
                        continue
                    need = next(
                        (
                            d
                            for d, own in enumerate(dims)
                            if own and groups.factor_class[i, own[0]] == c
                        ),
                        None,
                    )
                    alike += need is not None
                    gathered += need is None
            if not alike and not gathered:
                words.append(f"{name}: split where it is stored")
            elif alike and not gathered:
                words.append(f"{name}: computed where it lies")
            elif gathered and not alike:
                words.append(f"{name}: gathered before use ({gathered} times)")
            else:
                words.append(f"{name}: gathered {gathered} times, computed in parts {alike} times")
        if not words:
            size = step.tensors[tensor].num_bytes
            return "small" if size < 1 << 20 else "whole: to split it would cost more"
        return "; ".join(words)

    def _readers(self, tensor: int) -> list[int]:
        """The operations of other groups that read the tensor, or a view of it."""
        groups = self.model.groups
        group = groups.of_tensor[tensor]
        found = {
            i
            for t in groups.groups[group].tensors
            for i in groups.step.readers[t]
            if groups.of_operation[i] != group and groups.step.operations[i].flops
        }
        return sorted(found)

    def explain(self, name: str) -> str:
        """A line for each alternative sharding of one tensor along one axis.

        Raises:
            AutoShardingError: no tensor has this name.
        """
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, 3)
            raise AutoShardingError(
                f"explain takes the name of a tensor of the table; got {name!r}. "
                f"Names like it: {', '.join(near) or ', '.join(list(self.tensors)[:3])}."
            )
        tensor = self.tensors[name]
        groups = self.model.groups
        tie = groups.tie[groups.of_tensor[tensor]]
        chosen = [list(c) for c in self.solution.choices]
        lines = [f"{name}: {self.spec(tensor, self.solution.choices)!r}; {self.reason(tensor)}"]
        for axis, axis_name in enumerate(self.axes):
            costs = self.model.axis_costs(axis, chosen)
            base = costs.total(chosen[axis])
            for option in costs.options[tie]:
                if option == chosen[axis][tie]:
                    continue
                other = [list(c) for c in chosen]
                other[axis][tie] = option
                added = costs.total(other[axis]) - base
                spec = self.spec(tensor, tuple(map(tuple, other)))
                lines.append(
                    f"  along {axis_name}, {spec!r}: {added * 1e3:+,.3f} ms by the model, "
                    f"all else as it is"
                )
        return "\n".join(lines)
