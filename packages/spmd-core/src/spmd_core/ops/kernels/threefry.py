"""Random bits that XLA fuses with their readers, on the CPU too.

On the CPU, jax computes bits in a loop over the rounds of the hash, with three arrays of the
result's size. Here the rounds are elementwise operations, as jax's are on GPUs and TPUs, which XLA
fuses with the sampler: only the sample is materialised, in half of the time. The bits are the same.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as jax_random

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def prng_key(seed: jax.Array) -> jax.Array:
    """The key of a 64-bit seed."""
    words = jnp.stack([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]).astype(np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def fused(key: jax.Array) -> jax.Array:
    """The same key, whose bits XLA fuses with their readers.

    Not for rejection samplers, which jax writes for its own key types: with another type,
    `jax.random.gamma` takes tens of times as long, and `jax.random.poisson` raises.

    Args:
        key: a threefry2x32 key.
    """
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_FUSED)


def _bits(key: jax.Array, width: int, shape: Sequence[int]) -> jax.Array:
    """Bits for each element: the hash of its position.

    Args:
        key: uint32 of shape (2,).
        width: bits of an element: 8, 16, 32 or 64.
        shape: the shape of the result.
    """
    return _words(*_hash(key, *_positions(shape)), width)


def is_supported(key: jax.Array) -> bool:
    """Whether `bits_at` supports this key: it must be of type threefry2x32, as most are."""
    impl = jax.random.key_impl(key)
    # Without the flag, jax hashes positions in another order.
    partitionable = bool(jax.config.values["jax_threefry_partitionable"])
    return bool(impl == _FUSED or (impl == "threefry2x32" and partitionable))


def bits_at(
    key: jax.Array, width: int, shape: Sequence[int], strides: Sequence[jax.Array]
) -> jax.Array:
    """The bits of elements of an array whose strides are only known when the program runs.

    Args:
        key: one for which `is_supported` holds.
        width: bits of an element: 8, 16, 32 or 64.
        shape: the number of elements along each dim.
        strides: the array's stride along each dim, 0-dim int64 arrays.
    """
    position = lax.full(shape, 0, np.int64)
    for dim, stride in enumerate(strides):
        position += lax.broadcasted_iota(np.int64, shape, dim) * stride
    high, low = (position >> 32).astype(np.uint32), position.astype(np.uint32)
    return _words(*_hash(jax.random.key_data(key), high, low), width)


def _words(high: jax.Array, low: jax.Array, width: int) -> jax.Array:
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        return (high.astype(dtype) << np.uint64(32)) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _positions(shape: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The high and the low 32 bits of each element's position in an array of this shape."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # An array without elements may have a large stride.
    is_short = math.prod(max(size, 1) for size in shape) < 2**32
    dtype = np.dtype(np.uint32 if is_short else np.uint64)
    position = lax.full(shape, 0, dtype)
    for dim, stride in enumerate(strides):
        position += lax.broadcasted_iota(dtype, shape, dim) * np.asarray(stride, dtype)
    if is_short:
        return lax.full(shape, 0, dtype), position
    return (position >> np.uint64(32)).astype(np.uint32), position.astype(np.uint32)


def _hash(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of 20 rounds.

    Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    high, low = high + words[0], low + words[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            high = high + low
            low = high ^ ((low << np.uint32(by)) | (low >> np.uint32(32 - by)))
        high = high + words[(i + 1) % 3]
        low = low + words[(i + 2) % 3] + np.uint32(i + 1)
    return high, low


_FUSED = jax_random.define_prng_impl(
    key_shape=(2,),
    seed=jax_random.threefry_prng_impl.seed,
    split=jax_random.threefry_prng_impl.split,
    fold_in=jax_random.threefry_prng_impl.fold_in,
    random_bits=_bits,
    name="threefry2x32_fused",
    tag="fused",
)
