"""What stands around a training loop: closures, compiled steps, rates."""
