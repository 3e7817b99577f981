"""The result of a search: shardings with their reasons, as a table, as code, and to a file."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from spmd_core import files
from spmd_core.auto.explained import Explainer
from spmd_core.auto.tried import Tried
from spmd_core.errors import AutoShardingError
from spmd_core.marks.marking import mark_sharding
from spmd_core.runtime.jax_sharding import jax_axis_names
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpecLike
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_VERSION = 1
_MOST_SHOWN = 16  # candidates in a table


@dataclass(frozen=True)
class Row:
    """A tensor of the step and its sharding.

    Attributes:
        name: such as `GPT.h.0.attn.weight`, or `input 0`.
        shape: of the whole tensor.
        spec: its partition spec.
        bytes: on one device.
        reason: what the sharding costs and saves, in words.
        marks_gradient: of a parameter, whether it is marked for its gradient's sake even if it is
            whole: devices add up their parts of a marked gradient in its own dtype, else in that of
            the product that computes it, which is bfloat16 under autocast.
    """

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpecLike
    bytes: int
    reason: str
    marks_gradient: bool = False

    @property
    def is_marked(self) -> bool:
        """Whether a loop needs a mark of this tensor."""
        return self.marks_gradient or _is_split(self.spec)


@dataclass(frozen=True)
class ShardingPlan:
    """Shardings of a step over a mesh, found by `auto_shard`.

    Attributes:
        mesh: the mesh.
        parameters: the parameters, buffers and other state of the step.
        inputs: its inputs, in the order in which the step reads them.
        activations: partition specs of modules' results, by the module's name.
        tried: the candidates, the chosen one first; empty for a plan that was loaded.
    """

    mesh: Mesh
    parameters: tuple[Row, ...]
    inputs: tuple[Row, ...]
    activations: Mapping[str, PartitionSpecLike]
    tried: tuple[Tried, ...] = ()
    _explainer: Explainer | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """A line for each parameter and input: spec, bytes on a device, and the reason.

        Those whose names differ in numbers alone, and that are sharded alike, share a line. The
        first 16 candidates follow, in the order in which they were preferred.
        """
        rows = [("tensor", "shape", "spec", "bytes", "reason")]
        for row, count in _folded((*self.parameters, *self.inputs)):
            name = row.name if count == 1 else f"{_pattern(row.name)} x{count}"
            rows.append(
                (name, str(list(row.shape)), _spec_text(row.spec), f"{row.bytes:,}", row.reason)
            )
        lines = [f"mesh {_mesh_text(self.mesh)}", *_aligned(rows)]
        if self.tried:
            lines += ["", *_aligned(self._candidates())]
            rest = len(self.tried) - _MOST_SHOWN
            if rest > 0:
                lines.append(f"and {rest} more")
        return "\n".join(lines)

    def _candidates(self) -> list[tuple[str, ...]]:
        titles = ("candidate", "asked for", "modelled", "propagated", "compiled", "modelled peak")
        rows: list[tuple[str, ...]] = [(*titles, "compiled peak")]
        is_measured = any(x.measured_s is not None for x in self.tried)
        if is_measured:
            rows[0] += ("measured",)
        shown = self.tried[:_MOST_SHOWN]
        for one in shown:
            solution = one.candidate.solution
            compiled = "does not fit" if one.refusal else _ms(one.seconds)
            peak = "-" if one.program is None else f"{one.program.peak_bytes / 1e6:,.1f} MB"
            rows.append(
                (
                    one.shardings.mesh_text,
                    one.candidate.kind.value + ", results marked" * one.shardings.marks_results,
                    _ms(solution.seconds),
                    _ms(one.propagated_s),
                    compiled,
                    f"{one.bytes / 1e6:,.1f} MB",
                    peak,
                )
            )
            if is_measured:
                rows[-1] += (_ms(one.measured_s),)
        return rows

    def code(self) -> str:
        """The marks as lines of Python: rules over names, for a file such as `shardings.py`."""
        names = jax_axis_names(self.mesh)
        shape = tuple(self.mesh.mesh_shape)
        lines = [
            f"mesh = spmd.Mesh(range({self.mesh.size()}), {shape}, {names})",
            "PARAMETERS = {",
            *(f"    {name!r}: {spec!r}," for name, spec in self._rules().items()),
            "}",
            "spmd.shard_module(model, PARAMETERS, mesh)",
        ]
        if self.activations:
            rules = _rules([(name, spec) for name, spec in self.activations.items()])
            lines += [
                "RESULTS = {",
                *(f"    {name!r}: {spec!r}," for name, spec in rules.items()),
                "}",
                "for name, module in model.named_modules():",
                "    spec = next((s for r, s in RESULTS.items() if re.search(r, name)), None)",
                "    if spec is not None:",
                "        module.register_forward_hook(",
                "            lambda module, inputs, result, spec=spec: (",
                "                spmd.mark_sharding(result, mesh, spec)",
                "                if isinstance(result, torch.Tensor) and result.dim() == len(spec)",
                "                else result",
                "            )",
                "        )",
            ]
        for row in self.inputs:
            lines.append(f"# {row.name}, of shape {list(row.shape)}: {row.spec!r}")
        return "\n".join(lines)

    def _rules(self) -> dict[str, PartitionSpecLike]:
        """The specs of the parameters to mark, by expressions for their names."""
        specs = [(row, row.spec if row.is_marked else ()) for row in self.parameters]
        rules = _rules([(_in_module(row.name), spec) for row, spec in specs])
        return {name: spec for name, spec in rules.items() if spec}

    def explain(self, name: str) -> str:
        """What the alternatives for one tensor would cost, with all others as they are.

        Args:
            name: as in the table.

        Raises:
            AutoShardingError: no tensor has this name, or the plan was loaded from a file.
        """
        if self._explainer is None:
            raise AutoShardingError(
                "explain needs the recorded step; got a plan that was loaded from a file. Call "
                "auto_shard again."
            )
        return self._explainer.explain(name)

    def apply(self, model: nn.Module) -> None:
        """Marks a model's parameters, and results of its modules, in place.

        Parameters are marked that are split, or whose gradients need it (`Row.marks_gradient`).
        Parameters are marked by `mark_sharding`; the results of modules by hooks that call it.
        Does not wait.

        Args:
            model: a model on device `xla`, with the parameters that the plan names.

        Raises:
            AutoShardingError: the plan names a parameter that the model lacks.
        """
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        rows = {_in_module(row.name): row for row in self.parameters}
        missing = sorted(set(rows) - set(named))
        if missing:
            raise AutoShardingError(
                f"a plan fits a model that has all of its parameters; got one without {missing}. "
                "Apply it to the model for which it was made, or call auto_shard again."
            )
        for name, row in rows.items():
            if row.is_marked:
                mark_sharding(named[name], self.mesh, row.spec)
        self.mark_results(model)

    def mark_results(self, model: nn.Module) -> None:
        """Marks the results of a model's modules from now on, by hooks."""
        modules = dict(model.named_modules())
        for name, spec in self.activations.items():
            if name in modules:
                mark_result(modules[name], self.mesh, spec)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, as JSON."""
        data = {
            "version": _VERSION,
            "mesh": self.mesh.text,
            "parameters": [vars(row) for row in self.parameters],
            "inputs": [vars(row) for row in self.inputs],
            "activations": dict(self.activations),
        }
        files.write_text(path, json.dumps(data, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ShardingPlan":
        """The plan in a file that `save` wrote.

        Raises:
            AutoShardingError: the file has no such plan.
        """
        try:
            data = json.loads(Path(path).read_text())
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']}")
            return ShardingPlan(
                Mesh.from_str(data["mesh"]),
                tuple(_row(x) for x in data["parameters"]),
                tuple(_row(x) for x in data["inputs"]),
                {name: _tuples(spec) for name, spec in data["activations"].items()},
            )
        except (ValueError, LookupError, TypeError) as error:
            raise AutoShardingError(
                f"{os.fspath(path)} must hold a plan that ShardingPlan.save wrote; got {error!r}. "
                "Make the plan again by auto_shard."
            ) from error


def mark_result(module: nn.Module, mesh: Mesh, spec: PartitionSpecLike) -> None:
    """Marks what a module returns from now on, by a hook."""
    module.register_forward_hook(_Marker(mesh, spec))


class _Marker:
    """A forward hook that marks a module's result: a tensor, or the first of a tuple or list."""

    def __init__(self, mesh: Mesh, spec: PartitionSpecLike) -> None:
        self._mesh, self._spec = mesh, spec

    def __call__(self, module: nn.Module, arguments: Any, result: Any) -> None:
        found = result
        if isinstance(result, (tuple, list)):
            found = result[0] if result else None
        if isinstance(found, XLAShardedTensor) and found.dim() == len(self._spec):
            mark_sharding(found, self._mesh, self._spec)


def _row(data: Mapping[str, Any]) -> Row:
    return Row(**{**data, "shape": tuple(data["shape"]), "spec": _tuples(data["spec"])})


def _tuples(spec: Sequence[Any]) -> PartitionSpecLike:
    return tuple(tuple(x) if isinstance(x, list) else x for x in spec)


def _in_module(name: str) -> str:
    """A tensor's name in its model, without the name of the model's class."""
    return name.partition(".")[2]


def _pattern(name: str) -> str:
    model, dot, path = name.partition(".")
    return model + dot + re.sub(r"\d+", "*", path)


def _folded(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Rows whose names differ in numbers alone and that are sharded alike, as one with a count."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (_pattern(row.name), row.shape, row.spec, row.reason)
        found.setdefault(key, []).append(row)
    return [(same[0], len(same)) for same in found.values()]


def _rules(named: Sequence[tuple[str, PartitionSpecLike]]) -> dict[str, PartitionSpecLike]:
    """Regular expressions for names, with numbers left open where all have one spec."""
    by_pattern: dict[str, set[PartitionSpecLike]] = {}
    for name, spec in named:
        by_pattern.setdefault(_expression(name), set()).add(spec)
    rules: dict[str, PartitionSpecLike] = {}
    for name, spec in named:
        open_form = _expression(name)
        key = open_form if len(by_pattern[open_form]) == 1 else f"^{re.escape(name)}$"
        rules[key] = spec
    return rules


def _expression(name: str) -> str:
    parts = re.split(r"(\d+)", name)
    return "^" + "".join(r"\d+" if p.isdigit() else re.escape(p) for p in parts) + "$"


def _spec_text(spec: PartitionSpecLike) -> str:
    return repr(spec) if _is_split(spec) else "replicated"


def _is_split(spec: PartitionSpecLike) -> bool:
    return any(x is not None for x in spec)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"


def _mesh_text(mesh: Mesh) -> str:
    return ",".join(f"{a}={n}" for a, n in zip(jax_axis_names(mesh), mesh.mesh_shape))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows]
