"""How a program splits dims, as far as the forms of its operations depend on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Splits:
    """How a program splits dims.

    Attributes:
        keep_whole: `Context.keep_whole`.
        num_devices: of the program.
        axis_sizes: of the axes of the mesh that split some dim.
        joins_axes: whether some tensor has a dim that is split over several axes, and another one
            over yet another axis.
        uneven: the numbers of shards over which some sharding splits a dim that they do not divide.
        has_whole_indices: whether the indices of gathers and scatters are to be whole on each
            device.
        keeps_nan: whether a maximum or minimum is to be NaN where an operand is.
        is_users: whether the function is a user's. Lowerings have convolutions and their own forms
            of other operations that the partitioner gets right.
    """

    keep_whole: Callable[[jax.Array, int], jax.Array]
    num_devices: int
    axis_sizes: tuple[int, ...] = ()
    joins_axes: bool = False
    uneven: frozenset[int] = frozenset()
    has_whole_indices: bool = False
    keeps_nan: bool = True
    is_users: bool = False

    def even_size(self, size: int) -> int:
        """The next size that each of the numbers of shards divides."""
        unit = math.lcm(*self.uneven)
        return -(-size // unit) * unit


def with_whole_dims(
    keep_whole: Callable[[jax.Array, int], jax.Array], x: jax.Array, dims: Sequence[int]
) -> jax.Array:
    """`x` with some dims whole on each device."""
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    back = [order.index(d) for d in range(x.ndim)]
    return jnp.transpose(keep_whole(jnp.transpose(x, order), len(dims)), back)
