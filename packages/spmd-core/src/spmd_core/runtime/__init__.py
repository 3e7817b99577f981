"""Devices, processes, placements and buffers: the hardware, and data transfer to and from it."""
