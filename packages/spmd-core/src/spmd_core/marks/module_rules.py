"""`shard_module`: marks a module's parameters and buffers by rules over their names, and reports what no rule, or no name, was for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.marks import marking
from spmd_core.sharding.mesh import Mesh, get_global_mesh
from spmd_core.sharding.partition_spec import PartitionSpec, ShardingSpec
from spmd_core.sharding.sharding import Sharding

Rule: TypeAlias = PartitionSpec | ShardingSpec | None


@dataclass(frozen=True)
class ShardingReport:
    """What `shard_module` did; `str()` is a text for people.

    Attributes:
        marked: the partition spec of each tensor that was marked, by its name in the module.
        left: names that a rule of None leaves to the partitioner.
        unmatched_names: parameters and buffers that no rule is for; they were left alone.
        unmatched_rules: rules that are for no name.
        ambiguous: for each name that rules with different specs are for, those rules; the first was applied.
    """

    __module__ = "spmd_core"  # a pickle names the public package, wherever this file lies

    marked: dict[str, PartitionSpec] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    unmatched_names: tuple[str, ...] = ()
    unmatched_rules: tuple[str, ...] = ()
    ambiguous: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each rule or name that strict mode refuses."""
        return (
            *(f"rule {rule!r} is for no parameter or buffer" for rule in self.unmatched_rules),
            *(f"no rule is for {name!r}" for name in self.unmatched_names),
            *(
                f"{name!r} has rules with different specs: {', '.join(map(repr, rules))}"
                for name, rules in self.ambiguous.items()
            ),
        )

    def __str__(self) -> str:
        width = max(map(len, self.marked), default=0)
        lines = [f"{name:<{width}}  {spec}" for name, spec in self.marked.items()]
        lines += [f"{name}  left to the partitioner" for name in self.left]
        return "\n".join([*lines, *self.problems])


def shard_module(
    module: nn.Module, rules: Mapping[str, Rule], mesh: Mesh | None = None, *, strict: bool = False
) -> ShardingReport:
    """Marks the parameters and buffers of a module, in place, by regular expressions over their names. Does not wait.

    The first rule whose expression is found anywhere in the name (`re.search`) applies; anchor it with `^` and `$` for a whole name. A tensor
    that has several names (tied weights) is marked once. Every rule is checked against every tensor before the first is marked.

    Args:
        module: on device `xla`.
        rules: for each expression a partition spec, a `ShardingSpec` (with its own mesh), `()` to replicate, or None to leave the tensor alone.
        mesh: the mesh of the specs; None: the global mesh.
        strict: a rule for no name, a name without a rule, and a name whose rules differ are errors instead of lines of the report.

    Returns:
        What was marked, and what no rule or no name was for.

    Raises:
        PartitionSpecError: a spec does not fit the mesh or its tensor, or, in strict mode, the report has problems. Nothing was marked.
        MeshError: there is neither `mesh` nor a global mesh.
        ValueError: an expression that cannot be compiled.
        DeviceMismatchError: a tensor that is to be marked is not on device `xla`.

    Example:
        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("xla")
        >>> print(
        ...     shard_module(
        ...         model,
        ...         {"0.weight": ("model", None), "2.weight": (None, "model"), "bias": ()},
        ...         mesh,
        ...     )
        ... )
        0.weight  ('model', None)
        0.bias    ()
        2.weight  (None, 'model')
        2.bias    ()
    """
    compiled = {text: _compile(text) for text in rules}
    tensors = _named_tensors(module)
    matches = {
        name: [text for text, rule in compiled.items() if rule.search(name)] for name in tensors
    }
    chosen: dict[
        int, tuple[str, ...]
    ] = {}  # by tensor: all rules for any of its names, in the order of the rules
    for name, found in matches.items():
        before = chosen.get(id(tensors[name]), ())
        chosen[id(tensors[name])] = tuple(text for text in rules if text in before or text in found)
    plan: dict[str, ShardingSpec] = {}
    left, unmatched, ambiguous = [], [], {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        texts = chosen[id(tensor)]
        if not texts:
            unmatched.append(name)
            continue
        specs = [_sharding_spec(name, tensor, text, rules[text], mesh) for text in texts]
        if any(_meaning(spec, tensor) != _meaning(specs[0], tensor) for spec in specs):
            ambiguous[name] = texts
        if specs[0] is None:
            left.append(name)
        else:
            plan[name] = specs[0]
    used = {text for texts in chosen.values() for text in texts}
    report = ShardingReport(
        {name: spec.partition_spec for name, spec in plan.items()},
        tuple(left),
        tuple(unmatched),
        tuple(text for text in rules if text not in used),
        ambiguous,
    )
    if strict and report.problems:
        raise PartitionSpecError(
            f"strict sharding needs exactly one spec for each parameter and buffer, and no rule to spare; got: {'; '.join(report.problems)}. "
            "Add, correct or anchor rules (None leaves a tensor to the partitioner), or call without strict."
        )
    for name in plan:
        marking.device_tensor(tensors[name], f"shard_module ({name})")
    for name, spec in plan.items():
        marking.mark_sharding(tensors[name], spec.mesh, spec.partition_spec)
    return report


def _compile(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"a rule's key is a regular expression over names; got {text!r}: {error}. Escape special characters with a backslash."
        ) from None


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _sharding_spec(
    name: str, tensor: torch.Tensor, text: str, rule: Rule, mesh: Mesh | None
) -> ShardingSpec | None:
    if rule is None:
        return None
    if not isinstance(rule, ShardingSpec):
        over = get_global_mesh() if mesh is None else mesh
        if over is None:
            raise MeshError(
                f"a partition spec needs a mesh; got rule {text!r} without one, and no global mesh is set. Pass mesh, or call set_global_mesh(mesh)."
            )
        rule = ShardingSpec(over, rule)
    try:
        Sharding.of(rule.mesh, rule.partition_spec, tensor.dim())
    except PartitionSpecError as error:
        raise PartitionSpecError(
            f"rule {text!r} does not fit {name!r} of shape {tuple(tensor.shape)}: {error}"
        ) from None
    return rule


def _meaning(spec: ShardingSpec | None, tensor: torch.Tensor) -> Sharding | None:
    return None if spec is None else Sharding.of(spec.mesh, spec.partition_spec, tensor.dim())
