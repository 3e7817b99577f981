"""What each overload computes: its lowering to jax, one file for each family."""
