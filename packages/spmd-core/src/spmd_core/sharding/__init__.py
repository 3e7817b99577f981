"""Meshes, partition specs and shardings: which device holds which block, as pure values."""
