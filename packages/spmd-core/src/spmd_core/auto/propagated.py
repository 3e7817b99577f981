"""The collectives of a lowered program by Shardy's own passes, without a compilation.

XLA's partitioner propagates shardings by these passes, so what they insert is close to what a
compiled program does, in a small part of its time. What XLA does afterwards is not seen, but for
two things that are counted as it does them: equal collectives of one value are one, and an
all-reduce whose result is sliced is a reduce-scatter.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_core import releases
from spmd_core.auto.machine import Machine
from spmd_core.program.lower import Lowered

_ir = releases.jax_module("jaxlib.mlir.ir", "Module", "RankedTensorType", "MLIRError")
_passes = releases.jax_module("jaxlib.mlir.passmanager", "PassManager")

MLIRError = _ir.MLIRError

# In this order: propagation, then a reshard wherever an operand has another sharding than the
# operation asks for, then each reshard as collectives.
_PASSES = (
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)
# Shardy's collectives, the attributes with the axes over which they communicate, and HLO's names.
_KINDS = {
    "sdy.all_gather": ("gathering_axes", "all-gather"),
    "sdy.all_reduce": ("reduction_axes", "all-reduce"),
    "sdy.reduce_scatter": ("reduce_scatter_axes", "reduce-scatter"),
    "sdy.all_to_all": ("params", "all-to-all"),
    "sdy.collective_permute": ("out_sharding", "collective-permute"),
}
# For each kind, the bytes that a device sends by ring algorithms, from the bytes of its result and
# the number of devices.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda result, n: result * (n - 1) / n,
    "all-reduce": lambda result, n: 2 * result * (n - 1) / n,
    "reduce-scatter": lambda result, n: result * (n - 1),
    "all-to-all": lambda result, n: result * (n - 1) / n,
    "collective-permute": lambda result, n: result,
}
# Operations whose result has the elements of their operand.
_SAME_ELEMENTS = ("stablehlo.convert", "stablehlo.transpose", "stablehlo.reshape")
# An axis, or a part of one, as Shardy and StableHLO write it.
_AXIS = re.compile(r'"([^"]+)"(?:(?::|, sub_axis_info = )\(\d+\)(\d+))?')


@dataclass(frozen=True)
class Moved:
    """What the collectives of one kind move in one run of a program.

    Attributes:
        kind: as in HLO, such as "all-gather".
        crosses: whether they communicate between slices.
        times: how many collectives run.
        bytes: what a device sends in all of them, by ring algorithms.
        kept: the bytes on a device of what they gather of the program's inputs outside of loops:
            parameters, which forward and backward read, so that they are there in between.
    """

    kind: str
    crosses: bool
    times: int
    bytes: float
    kept: float = 0.0


def propagated(lowered: Lowered, machine: Machine) -> tuple[Moved, ...]:
    """The collectives that Shardy inserts into a program, and those that it has, by kind.

    Args:
        lowered: the program, with shardings of its arguments and of the values that are marked.
        machine: its devices.

    Raises:
        MLIRError: Shardy refuses the module.
    """
    module: Any = lowered.stage.compiler_ir("stablehlo")
    with module.context:
        copy = _ir.Module.parse(module.operation.get_asm(binary=True))
        for name in _PASSES:
            _passes.PassManager.parse(f"builtin.module({name})").run(copy.operation)
        mesh = lowered.target.jax_mesh
        crossing = machine.crossing(mesh.devices.shape, lowered.target.device_ids)
        ids = np.array(lowered.target.device_ids)
        slices = np.array(machine.slices)[ids]
        return _Reader(copy, dict(mesh.shape), dict(zip(mesh.axis_names, crossing)), slices).read()


def seconds(found: Sequence[Moved], machine: Machine) -> float:
    """The modelled seconds of collectives, as if nothing overlapped them."""
    return sum(
        x.bytes
        * (machine.scatters if x.kind == "reduce-scatter" else 1.0)
        / machine.bandwidth(crosses=x.crosses)
        + x.times * machine.latency_s
        for x in found
    )


class _Reader:
    """Sums up the collectives of a module after Shardy's passes.

    Args:
        module: the module.
        sizes: the sizes of the mesh's axes.
        crossing: which of them cross slices.
        slices: the slice of each device of the program.
    """

    def __init__(
        self, module: Any, sizes: dict[str, int], crossing: dict[str, bool], slices: np.ndarray
    ) -> None:
        self._sizes, self._crossing, self._slices = sizes, crossing, slices
        self._functions = {
            f.attributes["sym_name"].value: f
            for f in module.body.operations
            if f.operation.name == "func.func"
        }
        self._found: dict[tuple[str, bool], tuple[int, float, float]] = {}
        self._seen: set[tuple[Any, str]] = set()
        self._regions: dict[tuple[Any, ...], list[Any]] = {}
        self._main = self._functions["main"].regions[0].blocks[0]

    def read(self) -> tuple[Moved, ...]:
        self._block(self._main, 1)
        return tuple(
            Moved(kind, crosses, times, sent, kept)
            for (kind, crosses), (times, sent, kept) in sorted(self._found.items())
        )

    def _block(self, block: Any, times: int) -> None:
        for view in block.operations:
            operation = view.operation
            if operation.name == "sdy.manual_computation" and self._is_computed_already(operation):
                continue
            if operation.name in _KINDS:
                self._inserted(operation, times)
            elif "replica_groups" in operation.attributes:
                self._written(operation, times)
            elif operation.name == "func.call":
                callee = self._functions[operation.attributes["callee"].value]
                self._block(callee.regions[0].blocks[0], times)
            inside = times * _length(operation) if operation.name == "stablehlo.while" else times
            for region in operation.regions:
                for inner in region.blocks:
                    self._block(inner, inside)

    def _is_computed_already(self, region: Any) -> bool:
        """Whether a manual region is the same, of the same values, as one that was read.

        XLA computes such regions once, as gathers in stages are.
        """
        # Texts take long: only where the operands are the same.
        others = self._regions.setdefault(tuple(region.operands), [])
        if any(_text(other) == _text(region) for other in others):
            return True
        others.append(region)
        return False

    def _inserted(self, operation: Any, times: int) -> None:
        """A collective of Shardy's, between whole tensors."""
        key, kind = _KINDS[operation.name]
        axes = self._axes(operation.attributes[key])
        size = math.prod(n for _, n in axes)
        result = _num_bytes(operation.results[0].type) / math.prod(
            n for _, n in self._axes(operation.attributes["out_sharding"])
        )
        same = (operation.operands[0], f"{kind} {operation.attributes[key]}")
        if same in self._seen:
            return
        self._seen.add(same)
        if kind == "all-reduce" and self._is_sliced(operation, axes):
            kind, result = "reduce-scatter", result / size
        is_kept = kind == "all-gather" and times == 1 and self._is_input(operation.operands[0])
        crosses = any(self._crossing[a] for a, _ in axes)
        self._add(kind, crosses, times, _SENT[kind](result, size), result if is_kept else 0.0)

    def _written(self, operation: Any, times: int) -> None:
        """A collective that the program has, in a manual region, between parts of tensors."""
        kind = operation.name.removeprefix("stablehlo.").replace("_", "-")
        if kind not in _SENT:
            return
        result = sum(_num_bytes(x.type) for x in operation.results)
        axes = self._axes(operation.attributes["replica_groups"])
        if axes:  # as jax 0.12 writes them
            size = math.prod(n for _, n in axes)
            crosses = any(self._crossing[a] for a, _ in axes)
        else:
            groups = np.array(operation.attributes["replica_groups"])
            members = self._slices[groups]
            size, crosses = groups.shape[1], bool((members != members[:, :1]).any())
        self._add(kind, crosses, times, _SENT[kind](result, size))

    def _add(self, kind: str, crosses: bool, times: int, sent: float, kept: float = 0.0) -> None:
        count, total, before = self._found.get((kind, crosses), (0, 0.0, 0.0))
        self._found[kind, crosses] = (count + times, total + times * sent, before + kept)

    def _is_input(self, value: Any) -> bool:
        """Whether a value is an input of the program, or one that is cast or laid out anew."""
        owner = value.owner
        while not isinstance(owner, _ir.Block):
            if owner.name not in _SAME_ELEMENTS:
                return False
            owner = owner.operands[0].owner
        return bool(owner == self._main)

    def _is_sliced(self, operation: Any, axes: list[tuple[str, int]]) -> bool:
        """Whether all readers slice the result along the axes over which it is summed."""
        readers = [use.owner.operation for use in operation.results[0].uses]
        return bool(readers) and all(
            reader.name == "sdy.all_slice"
            and set(axes) <= set(self._axes(reader.attributes["slicing_axes"]))
            for reader in readers
        )

    def _axes(self, attribute: Any) -> list[tuple[str, int]]:
        """The axes that an attribute names, with the sizes of the parts of them that it means."""
        found = _AXIS.findall(str(attribute).partition("replicated=")[0])
        return [(a, int(part or self._sizes[a])) for a, part in found]


def _text(operation: Any) -> str:
    """An operation without the names that depend on where it stands in the module."""
    text: str = operation.get_asm(use_local_scope=True)
    return text


def _num_bytes(kind: Any) -> float:
    tensor = _ir.RankedTensorType(kind)
    return _bits(tensor.element_type) / 8 * math.prod(tensor.shape)


def _bits(element: Any) -> int:
    if str(element).startswith("complex"):
        return 2 * _bits(_ir.ComplexType(element).element_type)
    width: int = element.width
    return width


def _length(loop: Any) -> int:
    """How often a loop runs: the constant that its counter is compared with; 1 if unknown."""
    constants = list(_constants(loop.regions[0].blocks[0]))
    return constants[0] if len(constants) == 1 else 1


def _constants(block: Any) -> Iterator[int]:
    for view in block.operations:
        if view.operation.name in ("stablehlo.constant", "sdy.constant"):  # as Shardy reads them
            value = view.operation.attributes["value"]
            if value.is_splat and not _ir.RankedTensorType(value.type).shape:
                yield int(value.get_splat_value().value)
