"""ResNet over images split by rows and columns: `python -m examples.resnet_spatial.train`."""

# Before torchvision, whose compiled part may be built for another torch: see
# spmd_core.torch_backend.torchvision_ops.
import spmd_core  # noqa: F401
