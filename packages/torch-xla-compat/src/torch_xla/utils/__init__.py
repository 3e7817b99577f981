"""Checkpointing and small helpers."""
