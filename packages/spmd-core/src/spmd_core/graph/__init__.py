"""What was recorded: specs, entries, values, and the storages that hold them."""
