"""Gradient checkpointing of a module; apply it before wrapping the module with FSDP."""

from torch import nn

from spmd_core.modules import checkpointing


def checkpoint_module(module: nn.Module) -> nn.Module:
    """`spmd_core.checkpoint_module` without options, as upstream's."""
    return checkpointing.checkpoint_module(module)
