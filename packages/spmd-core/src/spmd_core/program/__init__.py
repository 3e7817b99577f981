"""From pending storages to one started XLA program."""
