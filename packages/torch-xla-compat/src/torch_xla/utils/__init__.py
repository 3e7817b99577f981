"""torch_xla.utils: gradient checkpointing and small helpers."""
