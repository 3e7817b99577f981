"""Devices, processes, buffers and jax's shardings: the hardware, and transfer to and from it."""
