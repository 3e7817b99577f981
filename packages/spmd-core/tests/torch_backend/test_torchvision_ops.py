"""Any build of torchvision imports after spmd_core, and names its own missing operators."""

import os
from importlib import util
from pathlib import Path

import fresh
import pytest
import torch

import spmd_core as spmd

SOURCE = Path(spmd.__file__).parents[1]
pytestmark = pytest.mark.skipif(
    util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


def run(code):
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = fresh.run(["-W", "error", "-c", code], env)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_torchvision_imports_after_spmd_core_without_warnings():
    code = (
        "import spmd_core, sys; assert 'torchvision' not in sys.modules; "
        "import torchvision; print(torchvision.models.resnet18.__name__)"
    )
    assert run(code).strip() == "resnet18"


def test_the_operators_are_declared_once():
    assert hasattr(torch.ops.torchvision, "nms")
    assert spmd.torch_backend.torchvision_ops.install() is None


@pytest.mark.slow
def test_absent_torchvision_is_left_alone():
    code = """
import importlib.util, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "torchvision" else find(name)
import spmd_core
print(hasattr(torch.ops.torchvision, "nms"))
"""
    assert run(code).strip() == "False"


def test_a_missing_compiled_operator_is_named():
    from torchvision.extension import _has_ops  # noqa: PLC0415  (optional)
    from torchvision.ops import nms  # noqa: PLC0415

    if _has_ops():
        pytest.skip("this torchvision has its compiled operators")
    with pytest.raises(RuntimeError, match=r"Couldn't load custom C\+\+ ops"):
        nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
