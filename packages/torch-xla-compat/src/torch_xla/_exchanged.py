"""Values that processes exchange, as JSON, which unlike a pickle cannot run code."""

import base64
import json
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, str)


def to_bytes(value: Any) -> bytes:
    """A value for another process.

    Raises:
        TypeError: it is neither plain, bytes, a tensor on the CPU or a numpy array, nor a list, a
            tuple or a dict of these.
    """
    return json.dumps(_packed(value)).encode()


def from_bytes(text: bytes) -> Any:
    """The value of `to_bytes`."""
    return _unpacked(json.loads(text))


def _packed(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_packed(one) for one in value]
    if kind is tuple:
        return {"tuple": [_packed(one) for one in value]}
    if kind is dict:
        return {"dict": [[_packed(key), _packed(one)] for key, one in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        elements = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, [*value.shape], base64.b64encode(elements.tobytes()).decode()]}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        word = "array" if isinstance(value, np.ndarray) else "scalar"
        return {word: [value.dtype.str, [*value.shape], text]}
    raise TypeError(
        "processes exchange numbers, texts, bytes, tensors, numpy arrays, None, and lists, tuples "
        f"and dicts of these; got {kind.__module__}.{kind.__qualname__}. Pass its parts."
    )


def _unpacked(packed: Any) -> Any:
    if isinstance(packed, list):
        return [_unpacked(one) for one in packed]
    if not isinstance(packed, dict):
        return packed
    ((word, given),) = packed.items()
    if word == "tuple":
        return tuple(_unpacked(one) for one in given)
    if word == "dict":
        return {_unpacked(key): _unpacked(one) for key, one in given}
    if word == "bytes":
        return base64.b64decode(given)
    name, shape, text = given
    elements = bytearray(base64.b64decode(text))
    if word == "tensor":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        if not elements:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(elements, dtype=torch.uint8).view(dtype).reshape(shape)
    array = np.frombuffer(elements, np.dtype(name)).reshape(shape)
    return array if word == "array" else array[()]
