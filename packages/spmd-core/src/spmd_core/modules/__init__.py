"""Functions and wrappers that change an `nn.Module`: FSDP, checkpointing, einsum linear layers."""
