"""The collectives of `xla_model` between replicas: in SPMD mode there is one, with whole values.

In a manual region (`torch_xla.core._replica_groups`) they exchange the blocks of devices.
"""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.arguments import checked, require_int, require_kind
from torch_xla.core import _replica_groups

REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX = (
    "sum",
    "mul",
    "and",
    "or",
    "min",
    "max",
)
_REDUCTIONS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)


def check_world_of_one(groups: Any) -> None:
    """ValueError for more than the one replica, TypeError for what is no list of lists."""
    for group in groups if isinstance(groups, (list, tuple)) else [groups or []]:
        require_kind("a group of replicas", group, list, tuple, range, write="groups=None")
    if groups and any(list(group) != [0] for group in groups):
        raise ValueError(
            f"groups name replicas, and in SPMD mode there is one, number 0; got {groups}. "
            "Leave groups out, or enter a manual region first."
        )


def _reduction(reduce_type: str) -> None:
    if reduce_type not in _REDUCTIONS:
        raise ValueError(
            f"a reduction is one of {', '.join(_REDUCTIONS)}; got {reduce_type!r}. "
            "Use one of the constants REDUCE_*."
        )


def require_tensors(name: str, tensors: object) -> None:
    """Raises TypeError for what is no list of tensors."""
    require_kind(name, tensors, list, tuple, write="the tensors in a list")
    for index, tensor in enumerate(tensors):  # type: ignore[arg-type,var-annotated]
        require_kind(f"{name}[{index}]", tensor, torch.Tensor, write="a tensor")


def _check_dim(
    name: str, dim: int, value: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """IndexError for a dim that the value lacks, as for the same call with several replicas."""
    require_kind("value", value, torch.Tensor, write="a tensor")
    if output is not None:
        require_kind("output", output, torch.Tensor, write="a tensor of the result's shape")
    if not -value.dim() <= require_int(name, dim) < value.dim():
        raise IndexError(
            f"{name} is a dim of the value, which has {value.dim()}; got {dim!r}. "
            f"Write for instance {name}=0."
        )


@checked()
def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> Any:
    """Reduces over all replicas: with one, a copy times `scale`; a list is scaled in place.

    With one replica this holds for tensors of any device, as in torch_xla, where a world of one
    reduces nothing.

    In a manual region the replicas are the region's devices, and `groups` contains their numbers.
    This holds for all collectives of this module.

    Raises:
        TypeError: `inputs` is neither a tensor nor a list of tensors.
        ValueError: there is no such reduction, or no such replica.
    """
    _reduction(reduce_type)
    require_tensors("inputs", [inputs] if isinstance(inputs, torch.Tensor) else inputs)
    region = _replica_groups.region(inputs)
    if region is not None:
        return _replica_groups.all_reduce(region, reduce_type, inputs, scale, groups)
    if not isinstance(inputs, torch.Tensor) and any(
        _replica_groups.region(tensor) is not None for tensor in inputs
    ):
        for tensor in inputs:
            tensor.copy_(all_reduce(reduce_type, tensor, scale, groups))
        return None
    check_world_of_one(groups)
    if isinstance(inputs, torch.Tensor):
        return inputs * scale if scale != 1.0 else inputs.clone()
    if scale != 1.0:
        for tensor in inputs:
            tensor.mul_(scale)
    return None


@checked()
def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Concatenates the values of all replicas: with one replica, returns the value."""
    _check_dim("dim", dim, value, output)
    region = _replica_groups.region(value)
    if region is not None:
        gathered = _replica_groups.all_gather(region, value, dim, groups)
        return gathered if output is None else output.copy_(gathered)
    check_world_of_one(groups)
    return value if output is None else output.copy_(value)


@checked(shard_count=1)
def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Any = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Returns a replica's part of the sum over replicas: with one, the value times `scale`.

    Raises:
        ValueError: `shard_count` is not the number of replicas.
    """
    _reduction(reduce_type)
    _check_dim("scatter_dim", scatter_dim, input, output)
    region = _replica_groups.region(input)
    if region is not None:
        part = _replica_groups.reduce_scatter(
            region, reduce_type, input, scale, scatter_dim, shard_count, groups
        )
        return part if output is None else output.copy_(part)
    check_world_of_one(groups)
    if shard_count != 1:
        raise ValueError(
            f"there is one replica in SPMD mode; got shard_count={shard_count}. "
            "Use spmd_core.shard_map and reduce_scatter along a mesh axis."
        )
    result = input * scale
    return result if output is None else output.copy_(result)


@checked(split_count=1)
def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Any = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Exchanges parts between replicas: with one replica, returns the value.

    Raises:
        ValueError: `split_count` is not the number of replicas.
    """
    _check_dim("split_dimension", split_dimension, value)
    _check_dim("concat_dimension", concat_dimension, value)
    region = _replica_groups.region(value)
    if region is not None:
        return _replica_groups.all_to_all(
            region, value, split_dimension, concat_dimension, split_count, groups
        )
    check_world_of_one(groups)
    if split_count != 1:
        raise ValueError(
            f"there is one replica in SPMD mode; got split_count={split_count}. "
            "Use spmd_core.shard_map and all_to_all along a mesh axis."
        )
    return value


def collective_permute(value: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Sends values between (source, target) pairs of replicas.

    With one replica: a copy of the value for the pair (0, 0), zeros without it. ValueError for any
    other pair.
    """
    require_kind("value", value, torch.Tensor, write="a tensor")
    for pair in pairs if isinstance(pairs, (list, tuple)) else [pairs]:
        require_kind("a pair of replicas", pair, list, tuple, write="pairs=[(0, 0)]")
    given = [tuple(pair) for pair in pairs]
    if any(pair != (0, 0) for pair in given):
        raise ValueError(
            f"there is one replica in SPMD mode, number 0; got {given}. "
            "Use spmd_core.shard_map and collective_permute along a mesh axis."
        )
    return value.clone() if given else torch.zeros_like(value)


@checked()
def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Any = None,
    pin_layout: bool = True,
) -> None:
    """Broadcasts the root's values: does nothing, as there is one replica, which is the root."""
    require_tensors("tensors", tensors)
    check_world_of_one(groups)
    if root_ordinal != 0:
        raise ValueError(
            f"there is one replica in SPMD mode, number 0; got root_ordinal={root_ordinal}. "
            "Leave it out."
        )


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Broadcasts the first replica's parameters: does nothing, as there is one replica."""
    require_kind("model", model, torch.nn.Module, write="a torch.nn.Module")
