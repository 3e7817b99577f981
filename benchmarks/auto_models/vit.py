"""transformers' ViT, on random images.

Legend: N images, T patches and one, D width, F the MLP's hidden size.
"""

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.model import Built, Model, adamw, train_step
from benchmarks.auto_models.resnet import classification_loss
from examples.gpt2.shardings import Spec
from examples.training.attention import CAUSAL_SDPA
from examples.training.remat import recompute

# By size: layers, width, heads, rows of an image and of a patch, classes, images of a batch, and
# whether blocks compute again in the backward. B/16, L/16 and H/14 are the paper's.
SIZES = {
    "tiny": (2, 32, 4, 16, 4, 16, 8, False),
    "small": (4, 256, 8, 64, 8, 1000, 16, False),
    "B/16": (12, 768, 12, 224, 16, 1000, 512, False),
    "L/16": (24, 1024, 16, 224, 16, 1000, 512, True),
    "H/14": (32, 1280, 16, 224, 14, 1000, 512, True),
}


class Logits(nn.Module):
    """The model, whose result is the logits (N, classes) alone."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.model = ViTForImageClassification(config)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(images_NCHW).logits
        return logits


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are images (N, 3, H, W) and labels (N,)."""
    num_layers, width, num_heads, rows, patch, num_classes, batch, is_recomputed = SIZES[size]
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=4 * width,
        image_size=rows,
        patch_size=patch,
        num_labels=num_classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=CAUSAL_SDPA,  # which asks the module, and ViT's are not causal
    )
    with torch.device(device):
        model = Logits(config).train()
        images = torch.randn(batch, 3, rows, rows)
        labels = torch.randint(num_classes, (batch,))
    if is_recomputed:
        recompute(model.model.vit.layers, "full")
    optimizer = adamw(model, lr=3e-4)
    is_bf16 = size not in ("tiny", "small")
    step = train_step(model, optimizer, classification_loss, is_bf16=is_bf16)
    return model, optimizer, step, (images, labels)


LAYER = r"model\.vit\.layers\.\d+\."
# Linear weights are (out, in). Heads and the MLP's hidden layer are split over tensor.
PARAMETERS: dict[str, Spec] = {
    LAYER + r"(attention\.[qkv]_proj|mlp\.fc1)\.weight": ("tensor", "fsdp"),
    LAYER + r"(attention\.[qkv]_proj|mlp\.fc1)\.bias": ("tensor",),
    LAYER + r"(attention\.o_proj|mlp\.fc2)\.weight": ("fsdp", "tensor"),
    r"model\.vit\.embeddings\.patch_embeddings\.projection\.weight": ("fsdp", None, None, None),
    r"model\.classifier\.weight": (("tensor", "fsdp"), None),
    r".*(norm\w*\.weight|bias|token|position_embeddings)": (None,),
}
OUTPUTS: dict[str, Spec] = {r"model\.vit\.(layers\.\d+|embeddings|layernorm)": HIDDEN}
MODEL = Model("vit", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
