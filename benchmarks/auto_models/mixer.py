"""MLP-Mixer (Tolstikhin et al., 2021): MLPs over patches and over channels in turns.

Legend: N images, S patches, C channels, P and F the hidden sizes of the two MLPs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.model import Built, Model, adamw, train_step
from benchmarks.auto_models.resnet import classification_loss
from examples.gpt2.shardings import Spec


@dataclass(frozen=True)
class Size:
    """Sizes of a Mixer, in the words of the paper's table 1."""

    num_layers: int
    channels: int
    patches_hidden: int
    channels_hidden: int
    image: int
    patch: int
    num_classes: int
    batch: int


SIZES = {
    #             layers   C    P     F  image patch classes batch
    "tiny": Size(2, 32, 16, 64, 16, 4, 16, 8),
    "small": Size(4, 256, 128, 1024, 64, 8, 1000, 32),
    "B/16": Size(12, 768, 384, 3072, 224, 16, 1000, 512),
    "L/16": Size(24, 1024, 512, 4096, 224, 16, 1000, 512),
}


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two layers with a GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """Mixes patches, then channels, each beside a residual connection."""

    def __init__(self, size: Size, num_patches: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.channels), nn.LayerNorm(size.channels)
        self.patches = mlp(num_patches, size.patches_hidden)
        self.channels = mlp(size.channels, size.channels_hidden)

    def forward(self, x_NSC: Tensor) -> Tensor:
        x_NSC = x_NSC + self.patches(self.norm1(x_NSC).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x_NSC + self.channels(self.norm2(x_NSC))
        return mixed


class Mixer(nn.Module):
    """Logits (N, classes) of images (N, 3, H, W)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.channels, size.patch, stride=size.patch)
        num_patches = (size.image // size.patch) ** 2
        self.blocks = nn.Sequential(*(Block(size, num_patches) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.channels)
        self.head = nn.Linear(size.channels, size.num_classes)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NSC = self.stem(images_NCHW).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(x_NSC)).mean(1))
        return logits


def build(name: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are images (N, 3, H, W) and labels (N,)."""
    size = SIZES[name]
    with torch.device(device):
        model = Mixer(size)
        images = torch.randn(size.batch, 3, size.image, size.image)
        labels = torch.randint(size.num_classes, (size.batch,))
    optimizer = adamw(model, lr=1e-3)
    is_bf16 = name not in ("tiny", "small")
    step = train_step(model, optimizer, classification_loss, is_bf16=is_bf16)
    return model, optimizer, step, (images, labels)


# Linear weights are (out, in). Each MLP is column parallel, then row parallel.
PARAMETERS: dict[str, Spec] = {
    r"stem\.weight": ("fsdp", None, None, None),
    r"blocks\.\d+\.(patches|channels)\.0\.weight": ("tensor", "fsdp"),
    r"blocks\.\d+\.(patches|channels)\.0\.bias": ("tensor",),
    r"blocks\.\d+\.(patches|channels)\.2\.weight": ("fsdp", "tensor"),
    r"head\.weight": (("tensor", "fsdp"), None),
    r".*(norm\d?\.(weight|bias)|bias)": (None,),
}
OUTPUTS: dict[str, Spec] = {r"blocks\.\d+": HIDDEN, r"norm": HIDDEN}
MODEL = Model("mixer", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
