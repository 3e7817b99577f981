"""Builds torchvision's ResNets, and a small one of the same blocks, for images (N, C, H, W)."""

import itertools

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models
from torchvision.models.resnet import BasicBlock

from examples.resnet_spatial.presets import SMALL


class SmallResNet(nn.Module):
    """ResNet's stem and one block for each stage, each with half of the rows of the one before.

    Args:
        widths: channels of the stages.
        num_classes: of the result, logits of shape (N, num_classes).
    """

    def __init__(self, widths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        first = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = nn.Sequential(BasicBlock(first, first))
        for before, width in itertools.pairwise(widths):
            shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=2, bias=False), nn.BatchNorm2d(width)
            )
            self.stages.append(BasicBlock(before, width, stride=2, downsample=shortcut))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """The logits, of shape (N, num_classes)."""
        features = self.stages(self.stem(images_NCHW)).mean((-1, -2))
        logits: torch.Tensor = self.head(features)
        return logits


def build_model(
    name: str, *, num_classes: int, order: torch.memory_format = torch.contiguous_format
) -> nn.Module:
    """A network in training mode, with random weights, on torch's default device.

    Args:
        name: one of `presets.MODELS`.
        num_classes: of the result, logits of shape (N, num_classes).
        order: the memory order of the weights.
    """
    model: nn.Module = (
        SmallResNet(SMALL[name], num_classes)
        if name in SMALL
        else models.get_model(name, weights=None, num_classes=num_classes)
    )
    model.to(memory_format=order)  # type: ignore[call-overload]  # which torch's stubs lack
    return model.train()


def forward_flops(name: str, *, num_classes: int, image_size: int) -> int:
    """FLOPs of one image's forward, of matrix products and convolutions; needs no memory."""
    with torch.device("meta"):
        model = build_model(name, num_classes=num_classes).eval()
        image = torch.empty(1, 3, image_size, image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return int(counter.get_total_flops())
