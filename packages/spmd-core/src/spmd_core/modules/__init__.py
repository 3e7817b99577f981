"""What takes an `nn.Module` and gives it back changed: FSDP, checkpointing."""
