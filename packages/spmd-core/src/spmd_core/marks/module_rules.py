"""`shard_module`: marks a module's parameters and buffers by rules over their names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from spmd_core.arguments import checked
from spmd_core.errors import PartitionSpecError
from spmd_core.marks import marking
from spmd_core.sharding.mesh import Mesh, given_or_global
from spmd_core.sharding.partition_spec import PartitionSpecLike, ShardingSpec
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import device_tensor

Rule: TypeAlias = PartitionSpecLike | ShardingSpec | None


@dataclass(frozen=True)
class ShardingReport:
    """The result of `shard_module`; `str()` is a text for people.

    Attributes:
        marked: the partition spec of each marked tensor, by its name in the module.
        left: names that a rule of None leaves to the partitioner.
        unmatched_names: parameters and buffers that match no rule; they were left alone.
        unmatched_rules: rules that match no name.
        ambiguous: for each name that matches rules with different specs, those rules; the first
            was applied.
    """

    __module__ = "spmd_core"  # pickles name the public package, which does not move

    marked: dict[str, PartitionSpecLike] = field(default_factory=dict)
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


@checked()
def shard_module(
    module: nn.Module, rules: Mapping[str, Rule], mesh: Mesh | None = None, *, strict: bool = False
) -> ShardingReport:
    """Marks a module's parameters and buffers, in place, by regular expressions over their names.

    The first rule whose expression is found anywhere in the name (`re.search`) applies; anchor it
    with `^` and `$` for a whole name. A tensor with several names (tied weights) is marked once.
    All rules are checked against all tensors before the first tensor is marked. Does not wait.

    Args:
        module: a module on device `xla`.
        rules: for each expression a partition spec, a `ShardingSpec` (with its own mesh), `()` to
            replicate, or None to leave the tensor alone.
        mesh: the mesh of the partition specs; None: the global mesh.
        strict: raise for a rule that matches no name, a name that matches no rule, and a name whose
            rules differ, instead of reporting them.

    Returns:
        The marked tensors, and the rules and names without a match.

    Raises:
        PartitionSpecError: a spec does not fit the mesh or its tensor, or, in strict mode, the
            report has problems. Nothing was marked.
        MeshError: there is neither `mesh` nor a global mesh.
        ValueError: an expression cannot be compiled.
        DeviceMismatchError: a tensor to be marked is not on device `xla`.

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
    if not isinstance(rules, Mapping):
        raise TypeError(
            "rules are a dict from expressions over names to partition specs; "
            f"got {rules!r}, of type {type(rules).__name__}. Write for instance {{'weight': ()}}."
        )
    compiled = {text: _compile(text) for text in rules}
    tensors = _named_tensors(module)
    matches = {
        name: [text for text, rule in compiled.items() if rule.search(name)] for name in tensors
    }
    # By tensor: all rules that match any of its names, in the order of the rules.
    chosen: dict[int, tuple[str, ...]] = {}
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
        if any(_sharding(spec, tensor) != _sharding(specs[0], tensor) for spec in specs):
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
            "strict sharding needs exactly one spec for each parameter and buffer, "
            f"and no rule to spare; got: {'; '.join(report.problems)}. Add, correct "
            "or anchor rules (None leaves a tensor to the partitioner), or call without strict."
        )
    for name in plan:
        device_tensor(tensors[name], f"shard_module ({name})")
    for name, spec in plan.items():
        marking.mark_sharding(tensors[name], spec.mesh, spec.partition_spec)
    return report


def _compile(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"a rule's key is a regular expression over names; got {text!r}: {error}. "
            "Escape special characters with a backslash."
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
        over = given_or_global(mesh, f"rule {text!r}")
        rule = ShardingSpec(over, rule)
    try:
        Sharding.of(rule.mesh, rule.partition_spec, tensor.dim())
    except PartitionSpecError as error:
        raise PartitionSpecError(
            f"rule {text!r} does not fit {name!r} of shape {tuple(tensor.shape)}: {error}"
        ) from None
    return rule


def _sharding(spec: ShardingSpec | None, tensor: torch.Tensor) -> Sharding | None:
    return None if spec is None else Sharding.of(spec.mesh, spec.partition_spec, tensor.dim())
