"""GPT-2, trained from scratch on real text over a device mesh. Start with `python -m examples.gpt2.train --help`."""

import spmd_core  # noqa: F401  before transformers, which imports torchvision where it is installed: see spmd_core.torchvision_ops
