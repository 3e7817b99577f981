"""Runs what reads a shape on the device and on the CPU, and compares."""

import pytest
import torch
from torch.utils import _pytree as pytree

import spmd_core as spmd

quiet = pytest.mark.filterwarnings(
    "ignore:the shape of the result", "ignore:indexing with dtype torch.uint8"
)


def reads() -> int:
    """How many shapes were read so far."""
    return spmd.metrics.counter("data_dependent_reads")


def both(function):
    """Asserts that CPU and device give equal results, or exceptions of one type.

    Returns the device's result or exception.
    """
    results = []
    for device in ("cpu", "xla"):
        try:
            results.append(function(device))
        except (RuntimeError, IndexError) as error:
            results.append(error)
    right, got = results
    if isinstance(right, Exception):
        assert type(got) is type(right), (right, got)
        return got
    assert not isinstance(got, Exception), got
    for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(right), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.device.type == "xla"
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs
    return got


def t(device, *values, dtype=None):
    """A tensor of these values."""
    return torch.tensor(values, dtype=dtype, device=device)
