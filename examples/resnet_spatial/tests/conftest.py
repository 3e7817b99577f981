"""Folders of images that the tests draw."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from examples.resnet_spatial import shapes


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder(name, per_class)` writes PNG files of shapes, in a folder for each kind."""

    def write(name: str = "images", per_class: int = 3, size: int = 40) -> Path:
        root = tmp_path / name
        num = per_class * len(shapes.KINDS)
        images, kinds = shapes.draw(4 * num, size, torch.Generator().manual_seed(per_class))
        for kind, kind_name in enumerate(shapes.KINDS):
            (root / kind_name).mkdir(parents=True)
            of_kind = images[kinds == kind][:per_class]
            assert len(of_kind) == per_class
            for i, image in enumerate(of_kind):
                picture = v2.functional.to_pil_image((image / 6 + 0.5).clamp(0, 1))
                picture.save(root / kind_name / f"{i}.png")
        return root

    return write
