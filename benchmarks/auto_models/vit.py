"""A vision transformer (Dosovitskiy et al., 2021), on random images.

Not transformers' own: its weights are drawn by torch's `trunc_normal_`, which reads on the host
whether to draw again, so a model would be drawn before it is sharded.

Legend: N images, T patches and a class token, D width, H heads, E width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.mixer import mlp
from benchmarks.auto_models.model import Built, Model, adamw, train_step
from benchmarks.auto_models.resnet import classification_loss
from examples.gpt2.shardings import Spec
from examples.training.remat import recompute


@dataclass(frozen=True)
class Size:
    """Sizes of a ViT, in the words of the paper's table 1; whether blocks compute again."""

    num_layers: int
    width: int
    num_heads: int
    image: int
    patch: int
    num_classes: int
    batch: int
    is_recomputed: bool = False


SIZES = {
    #            layers   D   H image patch classes batch
    "tiny": Size(2, 32, 4, 16, 4, 16, 8),
    "small": Size(4, 256, 8, 64, 8, 1000, 16),
    "B/16": Size(12, 768, 12, 224, 16, 1000, 512),
    "L/16": Size(24, 1024, 16, 224, 16, 1000, 512, True),
    "H/14": Size(32, 1280, 16, 224, 14, 1000, 512, True),
}


class Attention(nn.Module):
    """Self-attention of all patches; heads stand together in the features of q, k and v."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.out = nn.Linear(width, width)

    def forward(self, x_NTD: Tensor) -> Tensor:
        q, k, v = (
            layer(x_NTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed_NHTE = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.out(mixed_NHTE.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention, then an MLP, each beside a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp = mlp(width, 4 * width)

    def forward(self, x_NTD: Tensor) -> Tensor:
        x_NTD = x_NTD + self.attention(self.norm1(x_NTD))
        mixed: Tensor = x_NTD + self.mlp(self.norm2(x_NTD))
        return mixed


class ViT(nn.Module):
    """Logits (N, classes) of images (N, 3, rows, columns)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        num_patches = (size.image // size.patch) ** 2
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_patches + 1, size.width))
        blocks = (Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        patches_NTD = self.stem(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(images), -1, -1)
        x_NTD = torch.cat((token, patches_NTD), 1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x_NTD))[:, 0])
        return logits


def build(name: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are images (N, 3, rows, columns), labels (N,)."""
    size = SIZES[name]
    with torch.device(device):
        model = ViT(size)
        images = torch.randn(size.batch, 3, size.image, size.image)
        labels = torch.randint(size.num_classes, (size.batch,))
    if size.is_recomputed:
        recompute(model.blocks, "full")
    optimizer = adamw(model, lr=3e-4)
    is_bf16 = name not in ("tiny", "small")
    step = train_step(model, optimizer, classification_loss, is_bf16=is_bf16)
    return model, optimizer, step, (images, labels)


# Linear weights are (out, in). Heads and the MLP's hidden layer are split over tensor.
PARAMETERS: dict[str, Spec] = {
    r"stem\.weight": ("fsdp", None, None, None),
    r"blocks\.\d+\.(attention\.[qkv]|mlp\.0)\.weight": ("tensor", "fsdp"),
    r"blocks\.\d+\.(attention\.[qkv]|mlp\.0)\.bias": ("tensor",),
    r"blocks\.\d+\.(attention\.out|mlp\.2)\.weight": ("fsdp", "tensor"),
    r"head\.weight": (("tensor", "fsdp"), None),
    r"token|positions|.*(norm\d?\.(weight|bias)|bias)": (None,),
}
OUTPUTS: dict[str, Spec] = {r"blocks\.\d+": HIDDEN, r"norm": HIDDEN}
MODEL = Model("vit", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
