"""Registers device `xla` with torch: its dispatcher, device guard, autocast and random state."""
