"""The device as torch knows it: what is registered with torch."""
