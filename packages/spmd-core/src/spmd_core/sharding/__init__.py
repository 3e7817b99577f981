"""Where blocks live: meshes, partition specs and shardings, as pure values."""
