"""Llama by plans of tensor, sequence and loss parallelism: `python -m examples.llama_tp.train`."""

# Before transformers, which imports torchvision if it is installed: see
# spmd_core.torch_backend.torchvision_ops.
import spmd_core  # noqa: F401
