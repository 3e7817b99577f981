"""Plain Python values as JSON and back: what a checkpoint holds beside its arrays. No pickle."""

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from spmd_core import dtypes
from spmd_core.errors import CheckpointError

# The key of an object that stands for a value that JSON lacks: {"$": kind, ...}.
KIND = "$"
TENSOR = "tensor"
# Of a tensor's path and value, what stands for it; of what stands for it, the tensor.
Pack = Callable[[str, torch.Tensor], Any]
Unpack = Callable[[str, Mapping[str, Any]], Any]


def encode(path: str, value: Any, pack: Pack) -> Any:
    """A value as JSON.

    Args:
        path: where it stands, in words of the user: the names and indices that lead to it, joined
            by dots.
        value: numbers, texts, bytes, None, dtypes, devices, numpy's scalars and arrays, tensors,
            and lists, tuples, sets and dicts of these.
        pack: of the path and a tensor, what stands for it.

    Raises:
        CheckpointError: something else, such as an object of a class.
    """
    # bool is an int, and an enum may be one: exact types alone.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return pack(path, value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {KIND: "array", "of": pack(path, torch.from_numpy(np.array(value)))}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {
            KIND: "scalar",
            "dtype": value.dtype.name,
            "value": encode(path, value.item(), pack),
        }
    if type(value) is complex:
        parts = [encode(path, part, pack) for part in (value.real, value.imag)]
        return {KIND: "complex", "parts": parts}
    if type(value) in (bytes, bytearray):
        return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        kind = "dtype" if isinstance(value, torch.dtype) else "device"
        return {KIND: kind, "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _mapping(path, value, pack)
    if isinstance(value, list | tuple | set | frozenset):
        return _sequence(path, value, pack)
    raise CheckpointError(
        "a checkpoint holds tensors, numbers, texts, bytes, None, and lists, tuples, sets and "
        f"dicts of these; got a {type(value).__module__}.{type(value).__qualname__} at {path!r}. "
        "Convert it, or leave it out: nothing is pickled."
    )


def _mapping(path: str, value: Mapping[Any, Any], pack: Pack) -> Any:
    items = [(key, encode(joined(path, key), item, pack)) for key, item in value.items()]
    if all(type(key) is str and key != KIND for key in value):
        return dict(items)
    return {
        KIND: "dict",
        "items": [[encode(joined(path, key), key, pack), item] for key, item in items],
    }


def _sequence(path: str, value: Any, pack: Pack) -> Any:
    is_set = isinstance(value, set | frozenset)
    if hasattr(value, "_fields") or type(value) not in (list, tuple, set, frozenset, torch.Size):
        raise CheckpointError(
            "a checkpoint holds lists, tuples and sets, and no classes that derive from them; got "
            f"a {type(value).__qualname__} at {path!r}. Convert it: nothing is pickled."
        )
    items = sorted(value, key=repr) if is_set else value
    packed = [encode(joined(path, i), item, pack) for i, item in enumerate(items)]
    if type(value) is list:
        return packed
    kind = "set" if is_set else "size" if type(value) is torch.Size else "tuple"
    return {KIND: kind, "items": packed}


def decode(path: str, value: Any, unpack: Unpack) -> Any:
    """The value that `encode` was given; sets are mutable.

    Args:
        path: where it stands.
        value: JSON.
        unpack: of the path and what stands for a tensor, the tensor.
    """
    if isinstance(value, list):
        return [decode(joined(path, i), item, unpack) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode(joined(path, key), item, unpack) for key, item in value.items()}
    if kind == TENSOR:
        return unpack(path, value)
    if kind == "array":
        return dtypes.numpy_view(unpack(path, value["of"]).cpu())
    if kind == "dict":
        pairs = [(decode(path, key, unpack), item) for key, item in value["items"]]
        return {key: decode(joined(path, key), item, unpack) for key, item in pairs}
    if kind in ("tuple", "set", "size"):
        items = [decode(joined(path, i), item, unpack) for i, item in enumerate(value["items"])]
        return {"tuple": tuple, "set": set, "size": torch.Size}[kind](items)
    return _DECODED[kind](value)


_DECODED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "scalar": lambda value: np.dtype(value["dtype"]).type(decode("", value["value"], _no_tensor)),
    "complex": lambda value: complex(*(decode("", part, _no_tensor) for part in value["parts"])),
    "bytes": lambda value: base64.b64decode(value["base64"]),
    "dtype": lambda value: getattr(torch, value["value"]),
    "device": lambda value: torch.device(value["value"]),
}


def _no_tensor(path: str, value: Mapping[str, Any]) -> Any:
    raise AssertionError(path)


def joined(path: str, key: Any) -> str:
    """The path of an item."""
    return f"{path}.{key}" if path else str(key)
