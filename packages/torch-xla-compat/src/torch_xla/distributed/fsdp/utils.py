"""Gradient checkpointing of a module; apply it before wrapping the module with FSDP."""

from spmd_core.modules.checkpointing import checkpoint_module as checkpoint_module
