"""One question per file: what the project measures about itself."""

import spmd_core  # noqa: F401  before transformers, which imports torchvision where it is installed: see spmd_core.torchvision_ops
