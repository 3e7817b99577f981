"""Measurements of the project; each file answers one question."""

# Before transformers, which imports torchvision if it is installed: see
# spmd_core.torch_backend.torchvision_ops.
import spmd_core  # noqa: F401
