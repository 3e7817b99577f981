"""Helpers that training scripts of PyTorch/XLA import from its tests."""
