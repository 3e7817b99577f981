"""ResNet of the recipe, on random images, with SGD and momentum."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd_core as spmd
from benchmarks.auto_models.manual import by_rules, mark_inputs
from benchmarks.auto_models.model import Built, Model, train_step
from examples.gpt2.shardings import Spec
from examples.resnet_spatial import shardings
from examples.resnet_spatial.model import build_model

NUM_CLASSES = 1000
# By size: the network, rows and columns of an image, and images of a batch.
SIZES = {
    "tiny": ("smoke", 32, 16),
    "small": ("small", 64, 32),
    "224": ("resnet50", 224, 512),
    "1024": ("resnet50", 1024, 64),
}
# Channels: the first convolution of a block is split along its output, the last along its input.
# fsdp splits the other of the two. A kernel (O, I, H, W).
COLUMN: Spec = (("tensor", "fsdp"), None, None, None)
ROW: Spec = ("fsdp", "tensor", None, None)
PARAMETERS: dict[str, Spec] = {
    r"(stages|layer\d)\.\d+(\.\d+)?\.conv1\.weight": COLUMN,
    r"(stages|layer\d)\.\d+(\.\d+)?\.conv(2|3)\.weight": ROW,
    r"(stem\.0|conv1|.*\.downsample\.0)\.weight": ("fsdp", None, None, None),
    r"(head|fc)\.weight": (("tensor", "fsdp"), None),
    r".*": (None,),  # batch norms and the last bias
}
IMAGES: Spec = (("data", "fsdp"), None, None, None)


def classification_loss(model: nn.Module, images_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Mean cross entropy over the images of a batch."""
    return F.cross_entropy(model(images_NCHW).float(), labels_N)


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are images (N, C, H, W) and labels (N,)."""
    name, rows, batch = SIZES[size]
    with torch.device(device):
        model = build_model(name, num_classes=NUM_CLASSES)
        images = torch.randn(batch, 3, rows, rows)
        labels = torch.randint(NUM_CLASSES, (batch,))
    lr = 0.1 * batch / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=True)
    is_bf16 = size not in ("tiny", "small")
    step = train_step(model, optimizer, classification_loss, is_bf16=is_bf16)
    return model, optimizer, step, (images, labels)


def spatial(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """The recipe's: images split by rows and columns beside the batch, weights replicated."""
    images, labels = inputs
    spec = shardings.batch_sharding(mesh).partition_spec
    spmd.mark_sharding(images, mesh, spec)
    mark_inputs((labels,), mesh)
    shardings.replicate([model], mesh)


OUTPUTS: dict[str, Spec] = {r"stages\.\d+|layer\d\.\d+": IMAGES}
MANUAL = {**by_rules(PARAMETERS, OUTPUTS), "spatial": spatial}
MODEL = Model("resnet", tuple(SIZES), build, MANUAL)
