"""Matches `input_sharding` with a batch's structure: which spec each tensor gets."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

import spmd_core as spmd
from spmd_core import dtypes
from spmd_core.arguments import require_kind
from spmd_core.errors import DataError
from spmd_core.steps import structures

Path: TypeAlias = tuple[str | int, ...]
"""The position of a value in a batch: keys of dicts, indexes of lists and tuples, field names."""

SpecFunction: TypeAlias = Callable[[Path, torch.Tensor], spmd.ShardingSpec | None]

InputSharding: TypeAlias = (
    spmd.ShardingSpec | SpecFunction | Mapping[str, Any] | Sequence[Any] | Any | None
)
"""How to shard a batch. One of:

- None: no sharding;
- a `ShardingSpec` for every tensor. A tensor with fewer dims takes the spec's first entries, so 1-D
  labels beside 4-D images are split like the images' batch dim; one with more dims is not split
  along the others; one without dims is not split;
- a structure like the batch's (dicts, lists, tuples, dataclasses, nested in any way), whose leaves
  are any of the others: None or a spec holds for every tensor below it;
- a function of the path and the tensor (on the host), which returns a `ShardingSpec` or None.

A spec that a structure or a function gives to one tensor must fit its rank: dims that it splits
must exist, unless the tensor has none.
"""


class MissingShardingError(DataError, KeyError):
    """A dict batch has keys that the dict of shardings lacks. (Also a KeyError, as in torch_xla.)

    Attributes:
        missing: those keys.
    """

    def __init__(self, message: str, missing: Sequence[Any]) -> None:
        super().__init__(message)
        self.missing = list(missing)

    __str__ = DataError.__str__  # KeyError would print the message's repr


class OptionalKeys(dict[str, Any]):
    """A dict of shardings whose keys a batch may lack.

    Args:
        shardings: a dict; empty if it is left out.
        more: further keys.

    Raises:
        TypeError: `shardings` is no dict.

    Example:
        >>> OptionalKeys(input_ids=None, weight=None)
        {'input_ids': None, 'weight': None}
    """

    def __init__(self, shardings: Mapping[str, Any] = MappingProxyType({}), /, **more: Any) -> None:
        require_kind("shardings", shardings, Mapping, write="for instance OptionalKeys(x=None)")
        super().__init__(shardings, **more)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a batch.

    Attributes:
        path: its position in the batch.
        tensor: on the host.
        spec: its sharding, with one entry for each dim; None for no sharding.
    """

    path: Path
    tensor: torch.Tensor
    spec: spmd.ShardingSpec | None


def matched(batch: Any, sharding: InputSharding) -> tuple[Any, list[Leaf]]:
    """The batch with numpy arrays as tensors, and its tensors with their specs.

    Copies only arrays that are read-only, not contiguous or of the other byte order. Arrays of
    strings and of objects are not changed.

    Raises:
        MissingShardingError: a dict has keys that its dict of shardings lacks.
        DataError: the structures differ, a spec is for a dim or a tensor that does not exist, or
            there are arrays of different shapes where one tensor is expected.
    """
    leaves = _Leaves()
    return _match(batch, sharding, (), leaves, named=False), leaves


def text(path: Path) -> str:
    """A path as Python writes it: `batch['images'][0]`."""
    return "batch" + "".join(f"[{part!r}]" for part in path)


def require_shardings(sharding: Any, where: str = "input_sharding") -> None:
    """Raises DataError for a part of `input_sharding` that is no sharding, function or None."""
    if _is_structure(sharding):
        parts = _children(sharding)
        # A tuple of another type, such as a partition spec, is no structure of a batch.
        if parts or dataclasses.is_dataclass(sharding) or not len(sharding):
            for key, part in parts.items():
                require_shardings(part, f"{where}[{key!r}]")
            return
    if sharding is None or isinstance(sharding, spmd.ShardingSpec):
        return
    if _is_structure(sharding) or not callable(sharding):
        raise _no_spec(sharding, where)


def may_give_parts(sharding: InputSharding) -> bool:
    """Whether a spec may be of one process's part of a tensor: see `ShardingSpec.minibatch`."""
    if _is_structure(sharding):
        return any(map(may_give_parts, _children(sharding).values()))
    if isinstance(sharding, spmd.ShardingSpec):
        return sharding.minibatch
    return callable(sharding)  # the function decides for each tensor


def fitted_spec(spec: spmd.ShardingSpec, ndim: int) -> tuple[Any, ...]:
    """The partition spec for a tensor of rank `ndim`: truncated, or padded with None, to `ndim`."""
    entries = tuple(spec.partition_spec)[:ndim]
    return entries + (None,) * (ndim - len(entries))


@functools.lru_cache(maxsize=256)
def _fitted(spec: spmd.ShardingSpec, ndim: int) -> spmd.ShardingSpec:
    return dataclasses.replace(spec, partition_spec=fitted_spec(spec, ndim))


class _Leaves(list[Leaf]):
    """The tensors that were found so far."""

    def __init__(self) -> None:
        self._spec_of: dict[int, spmd.ShardingSpec | None] = {}

    def add(self, path: Path, tensor: torch.Tensor, spec: spmd.ShardingSpec | None) -> torch.Tensor:
        """Adds a tensor; returns it, or a view if it occurs elsewhere with another spec.

        One object has one spec: the batch on the device is built by identity.
        """
        if self._spec_of.setdefault(id(tensor), spec) != spec:
            tensor = tensor.view_as(tensor)
        self.append(Leaf(path, tensor, spec))
        return tensor


def _match(value: Any, sharding: Any, path: Path, leaves: _Leaves, *, named: bool) -> Any:
    """Adds the tensors of `value`; `named` if a structure has `sharding` for just this value."""
    if isinstance(value, np.ndarray):
        value = _tensor_of(value, sharding, path)
    if isinstance(value, torch.Tensor):
        return leaves.add(path, value, _spec_of(value, sharding, path, named=named))
    if _is_structure(sharding):
        children = _paired(value, sharding, path)
    else:
        children = {key: (item, sharding) for key, item in _children(value).items()}
    if named and isinstance(sharding, spmd.ShardingSpec):
        _refuse_ragged(value, path)
    before = len(leaves)
    made = {
        key: _match(item, spec, (*path, key), leaves, named=_is_structure(sharding))
        for key, (item, spec) in children.items()
    }
    if named and isinstance(sharding, spmd.ShardingSpec) and len(leaves) == before:
        raise DataError(
            f"a sharding is for a tensor; got a {type(value).__name__} at {text(path)}, without "
            "any. Give None in its place, or return a tensor from the dataset."
        )
    return _rebuilt(value, made) if made else value


def _spec_of(
    tensor: torch.Tensor, sharding: Any, path: Path, *, named: bool
) -> spmd.ShardingSpec | None:
    if _is_structure(sharding):
        if isinstance(sharding, Mapping):
            raise _not_a_dict(tensor, sharding, path)
        raise _another_structure(tensor, sharding, path)
    if sharding is not None and not isinstance(sharding, spmd.ShardingSpec):
        if not callable(sharding):
            raise _no_spec(sharding, text(path))
        sharding, named = sharding(path, tensor), True
        if sharding is not None and not isinstance(sharding, spmd.ShardingSpec):
            raise _no_spec(sharding, text(path))
    if sharding is None or not tensor.ndim:
        return None
    absent = [entry for entry in sharding.partition_spec[tensor.ndim :] if entry is not None]
    if named and absent:
        raise DataError(
            "the dims that a sharding splits must exist; got the partition spec "
            f"{sharding.partition_spec} for {text(path)} of shape {tuple(tensor.shape)}. "
            f"Give it at most {tensor.ndim} entries."
        )
    return _fitted(sharding, tensor.ndim)


def _is_structure(sharding: Any) -> bool:
    """Whether a sharding has a part for each part of the batch."""
    return isinstance(sharding, Mapping | list | tuple) or (
        dataclasses.is_dataclass(sharding)
        and not isinstance(sharding, spmd.ShardingSpec | type)
        and not callable(sharding)
    )


def _children(value: Any) -> dict[Any, Any]:
    """The parts of a structure by key, index or field; none of any other value."""
    if isinstance(value, Mapping):
        return dict(value.items())
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    if is_named_tuple or type(value) in (list, tuple, set, frozenset):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def _paired(value: Any, sharding: Any, path: Path) -> dict[Any, tuple[Any, Any]]:
    """The parts of a value with those of the sharding's structure."""
    parts = _children(value)
    if isinstance(sharding, Mapping):
        if not isinstance(value, Mapping):
            raise _not_a_dict(value, sharding, path)
        missing = [key for key in parts if key not in sharding]
        if missing:
            raise MissingShardingError(
                "input_sharding must have an entry for every key of the batch; the keys "
                f"{missing} are missing from it, got {list(sharding)}. "
                "Add them, with None for a tensor that should not be sharded.",
                missing,
            )
        absent = [key for key, spec in sharding.items() if spec is not None and key not in parts]
        if absent and not isinstance(sharding, OptionalKeys):
            raise DataError(
                "every sharding must be for a key of the batch; got shardings for the keys "
                f"{absent}, and {text(path)} has {list(parts)}. "
                "Remove them, or pass spmd_data.OptionalKeys(...) for keys that may be absent."
            )
        return {key: (item, sharding[key]) for key, item in parts.items()}
    specs = _children(sharding)
    alike = dataclasses.is_dataclass(sharding) == dataclasses.is_dataclass(value)
    if not alike or isinstance(value, Mapping) or specs.keys() != parts.keys():
        raise _another_structure(value, sharding, path)
    return {key: (item, specs[key]) for key, item in parts.items()}


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """A structure like `value` with other parts; `value` itself if they are the same."""
    if all(parts[key] is item for key, item in _children(value).items()):
        return value
    if isinstance(value, Mapping):
        return structures.with_values(value, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if not dataclasses.is_dataclass(value):
        return type(value)(parts.values())
    clone = copy.copy(value)
    for name, item in parts.items():
        object.__setattr__(clone, name, item)
    return clone


def _tensor_of(array: np.ndarray, sharding: Any, path: Path) -> Any:
    """An array's memory as a tensor; an array of strings or objects itself."""
    if array.dtype.kind in "biufcV":
        try:
            return dtypes.tensor_view(array)
        except TypeError:
            pass  # an array of records, or of another dtype that torch lacks: not a tensor
    elif array.dtype.kind == "O" and sharding is not None:
        shapes = [np.shape(item) for item in array.flat if isinstance(item, np.ndarray)]
        if shapes:
            raise _ragged(shapes, path)
    return array


def _refuse_ragged(value: Any, path: Path) -> None:
    """Raises for a list of arrays of one rank whose shapes differ, under one spec."""
    if type(value) is not list or len(value) < 2:
        return
    if all(isinstance(item, torch.Tensor | np.ndarray) for item in value):
        shapes = [tuple(item.shape) for item in value]
        if len(set(shapes)) > 1 and len({len(shape) for shape in shapes}) == 1:
            raise _ragged(shapes, path)


def _ragged(shapes: Sequence[tuple[int, ...]], path: Path) -> DataError:
    shown = ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")
    return DataError(
        "the rows of a batch must have one shape to become one tensor; got "
        f"{len(shapes)} arrays of shapes {shown} at {text(path)}. "
        "Pad or pack them in the dataset or in the DataLoader's collate_fn."
    )


def _not_a_dict(value: Any, sharding: Mapping[Any, Any], path: Path) -> DataError:
    what = "batch" if not path else "value"
    where = "" if not path else f" at {text(path)}"
    return DataError(
        f"the input batch must be a dict when input_sharding is a dict; got a {what} of type "
        f"{type(value).__name__}{where} for the keys {sorted(map(str, sharding))}. "
        "Return dicts from the dataset, or pass one ShardingSpec for all tensors."
    )


def _another_structure(value: Any, sharding: Any, path: Path) -> DataError:
    def form(structure: Any) -> str:
        parts = _children(structure)
        return type(structure).__name__ + (f" with {list(parts)}" if parts else "")

    return DataError(
        "input_sharding must have the structure of the batch, or one spec for all that lies below "
        f"a place; got a {form(sharding)} for a {form(value)} at {text(path)}. "
        "Give one entry for each part, with None for a tensor that should not be sharded."
    )


def _no_spec(sharding: Any, where: str) -> DataError:
    return DataError(
        "a sharding must be a ShardingSpec or None; got "
        f"{type(sharding).__name__} for {where}. "
        "Pass for instance spmd.ShardingSpec(mesh, ('data', None))."
    )
