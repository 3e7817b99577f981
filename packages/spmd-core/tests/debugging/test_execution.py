"""Tests spmd_core.debugging.execution."""

import pytest
import torch

import spmd_core as spmd
from spmd_core import debugging


def test_execution_can_be_forbidden():
    x = torch.ones(3, device="xla") + 1
    debugging.allow_execution(False)
    try:
        with pytest.raises(
            spmd.errors.ProgramError,
            match=r"after allow_execution\(False\) nothing is executed; "
            r".*test_execution.py:\d+ needs a value",
        ):
            x.cpu()
    finally:
        debugging.allow_execution(True)
    assert x.tolist() == [2.0, 2.0, 2.0]
    with (
        spmd.compile(),
        pytest.raises(spmd.errors.SpmdError, match="a region says itself whether it may execute"),
    ):
        debugging.allow_execution(False)
