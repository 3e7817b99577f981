"""What arrays, tensors of the CPU and generators contain, to compare it from call to call."""

import array
import pickle
import random
from typing import Any

import numpy as np
import torch

from spmd_core.errors import CaptureError

_MOST_BYTES = 1 << 20
_RANDOM = (np.random.Generator, np.random.RandomState, random.Random)
_KINDS = (np.ndarray, bytearray, array.array, memoryview, *_RANDOM)


def has(value: Any) -> bool:
    """Whether `of` is for such an object."""
    return isinstance(value, _KINDS)


def of(path: str, value: Any) -> Any:
    """The elements as bytes, or a generator's state: equal if nothing was written.

    Args:
        path: where it is reached, for the error.
        value: an array and the like, a tensor of the CPU, or a generator of Python's or numpy's.

    Raises:
        CaptureError: it is too large to be compared at each call, or holds Python's objects.
    """
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        return bytes(value)
    if value.nbytes > _MOST_BYTES or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        raise CaptureError(
            "a captured step compares the arrays and the tensors of the CPU that it reaches, of "
            f"numbers and of at most {_MOST_BYTES:,} bytes; got one of {value.nbytes:,} bytes, "
            f"dtype {value.dtype}, at {path}. Pass it as an argument, as a tensor."
        )
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return value._version
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()
