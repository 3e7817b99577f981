"""Automatic sharding: shardings of a recorded step, found by a model and decided by compilation."""
