"""How a program splits dims, as far as the rules for the partitioner depend on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Splits:
    """How a program splits dims.

    Attributes:
        replicate_last_dims: `Context.replicate_last_dims`.
        num_devices: the number of devices of the program.
        axis_sizes: the sizes of the mesh axes that split some dim.
        joins_axes: whether some tensor has a dim that several axes split, and another dim that yet
            another axis splits.
        uneven: the numbers of shards of dims that are split unevenly.
        replicates_indices: whether the indices of gathers and scatters are to be replicated.
        keeps_nan: whether a maximum or minimum must be NaN if an operand is.
        is_users: whether the function is a user's own. Such a function needs more rules: lowerings
            write convolutions and some other operations in the right form themselves.
    """

    replicate_last_dims: Callable[[jax.Array, int], jax.Array]
    num_devices: int
    axis_sizes: tuple[int, ...] = ()
    joins_axes: bool = False
    uneven: frozenset[int] = frozenset()
    replicates_indices: bool = False
    keeps_nan: bool = True
    is_users: bool = False

    def even_size(self, size: int) -> int:
        """The next size that is a multiple of each number of shards in `uneven`."""
        unit = math.lcm(*self.uneven)
        return -(-size // unit) * unit


def replicate_dims(
    replicate_last_dims: Callable[[jax.Array, int], jax.Array], x: jax.Array, dims: Sequence[int]
) -> jax.Array:
    """`x` with some dims replicated."""
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    back = [order.index(d) for d in range(x.ndim)]
    return jnp.transpose(replicate_last_dims(jnp.transpose(x, order), len(dims)), back)
