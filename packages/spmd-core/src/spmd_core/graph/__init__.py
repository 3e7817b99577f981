"""The recorded graph: specs, entries, values, and the storages and views that hold them."""
