"""The order of an epoch's samples: a permutation that is computed on demand, not stored.

`permuted` is a keyed permutation of 0..n-1. It is a Feistel network on the smallest power of two
that holds n, walked until the result lies below n (cycle walking: Black and Rogaway 2002, "Ciphers
with arbitrary finite domains"). Each position costs the same, so every process computes the
positions that it needs, and no process holds a list of indices. The order depends on `n`, `seed`
and `epoch` alone: not on the machine, the number of processes or the releases of the libraries.
"""

import hashlib
from functools import lru_cache

import numpy as np

from spmd_core.errors import DataError

MAX_SAMPLES = 2**40

# In a small domain a Feistel network takes more rounds to be as even as chance. With these, the
# tests find no difference from chance for any n.
_ROUNDS = 12
_MIN_BITS = 6


def permuted(positions: np.ndarray, num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The samples at `positions` of the order of one epoch.

    Over all positions each sample occurs once.

    Args:
        positions: integers of any shape, each from 0 to `num_samples - 1`.
        num_samples: n, from 1 to 2**40.
        seed: any integer.
        epoch: any integer; another epoch has another order.

    Returns:
        The numbers of the samples: int64, of the shape of `positions`.

    Raises:
        DataError: `num_samples` or a position is out of range.

    Example:
        >>> sorted(permuted(np.arange(5), 5, seed=0, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise DataError(
            f"an order has from 1 to {MAX_SAMPLES:,} samples; got {num_samples:,}. "
            "Give a dataset with samples."
        )
    places = np.asarray(positions)
    if places.size and not (places.min() >= 0 and places.max() < num_samples):
        raise DataError(
            f"a position in the order of {num_samples:,} samples lies from 0 to "
            f"{num_samples - 1:,}; got positions from {places.min():,} to {places.max():,}. "
            "Take positions modulo the number of samples."
        )
    bits = max(_MIN_BITS, (num_samples - 1).bit_length())
    keys = _round_keys(seed, epoch)
    # A position is below n, and the network is a permutation of 0..2**bits-1: so a walk that starts
    # below n comes back below n, and two walks never end at the same number.
    found = _feistel(places.astype(np.uint64).ravel(), bits, keys)
    (outside,) = np.nonzero(found >= num_samples)
    while outside.size:
        walked = _feistel(found[outside], bits, keys)
        found[outside] = walked
        outside = outside[walked >= num_samples]
    return found.astype(np.int64).reshape(places.shape)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def _feistel(x: np.ndarray, bits: int, keys: tuple[np.uint64, ...]) -> np.ndarray:
    """A permutation of 0..2**bits-1, applied to each number of `x`, uint64."""
    num_low = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = x & low_mask, x >> num_low
    for position, key in enumerate(keys):
        if position % 2:
            low ^= _mixed(high + key) & low_mask
        else:
            high ^= _mixed(low + key) & high_mask
    return (high << num_low) | low


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014); changes `x`."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
