"""Private modules of torch_xla that test programs import."""
