"""Gradient checkpointing of a module, to be applied before it is wrapped."""

from spmd_core.recomputation import checkpoint_module as checkpoint_module
