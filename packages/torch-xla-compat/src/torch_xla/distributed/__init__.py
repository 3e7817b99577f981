"""torch_xla.distributed: sharding, data loaders, FSDP, process groups."""
