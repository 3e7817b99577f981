"""Manual regions, in which code computes on one device's blocks, and their collectives."""
