"""Functions of the device: `xla_model`, `xla_builder`, names of environment variables."""
