"""The lowerings of torch's overloads to jax, one file for each family of operations."""
