"""Devices, processes, buffers: what runs, and how data gets there."""
