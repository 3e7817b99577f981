"""Functions that say how tensors are sharded: marks, rules for modules, DTensor's placements."""
