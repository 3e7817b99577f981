"""Turns pending storages into one XLA program: lowers, compiles, caches and starts it."""
