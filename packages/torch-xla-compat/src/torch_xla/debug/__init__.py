"""torch_xla.debug: counters and profiles."""
