"""How tensors are sharded: marks, rules for modules, DTensor's placements."""
