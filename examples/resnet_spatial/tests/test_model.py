"""The networks: sizes, FLOPs, and no reading on the host."""

import pytest
import torch

from examples.resnet_spatial.model import SMALL, build_model, forward_flops


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.69), ("resnet50", 25.56)])
def test_published_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_published_flops() -> None:
    """torchvision's table has 4.09 billion multiply-adds for ResNet-50."""
    flops = forward_flops("resnet50", num_classes=1000, image_size=224)
    assert flops / 2e9 == pytest.approx(4.09, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_small_networks(name: str) -> None:
    model = build_model(name, num_classes=5)
    assert model.training
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
