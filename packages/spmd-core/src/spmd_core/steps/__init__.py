"""The training loop: step closures, compiled steps, rates, and structures of tensors."""
