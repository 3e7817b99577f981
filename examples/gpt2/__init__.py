"""GPT-2, trained from scratch on real text over a device mesh: `python -m examples.gpt2.train`."""

# Before transformers, which imports torchvision if it is installed: see
# spmd_core.torch_backend.torchvision_ops.
import spmd_core  # noqa: F401
