"""Marks, loaders and FSDP."""
