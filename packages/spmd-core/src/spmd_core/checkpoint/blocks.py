"""Which blocks of an array this process writes, and the chunks in which they lie on the disk.

Every process computes the same, from shapes and shardings alone: each distinct block has one owner
among the devices that hold it.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

# A chunk is read and checked as a whole: large enough for a disk's bandwidth, small enough that
# another sharding reads little more than it needs.
MAX_CHUNK_BYTES = 64 << 20

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Owned:
    """A block that a device of this process writes.

    Attributes:
        device: the device.
        bounds: a start and a stop for each dim of the array, without padding.
    """

    device: jax.Device
    bounds: Bounds


def owned(name: str, shape: Sequence[int], sharding: jax.sharding.Sharding) -> Iterator[Owned]:
    """The blocks that this process writes.

    Args:
        name: of the array; arrays of one sharding have different owners.
        shape: of the array as it is stored, with padding.
        sharding: of that.
    """
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        holders.setdefault(bounds, []).append(device)
    start = zlib.crc32(name.encode())
    process = jax.process_index()
    for number, (bounds, devices) in enumerate(sorted(holders.items(), key=lambda item: item[0])):
        by_id = sorted(devices, key=lambda device: device.id)
        device = by_id[(start + number) % len(by_id)]
        if device.process_index == process:
            yield Owned(device, bounds)


def clipped(bounds: Bounds, shape: Sequence[int]) -> Bounds:
    """A block without its padding."""
    return tuple((min(a, n), min(b, n)) for (a, b), n in zip(bounds, shape))


def chunk_shape(block: Sequence[int], shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of chunks of which each lies in one block, so that one process writes it.

    Args:
        block: the shape of a block, with padding.
        shape: of the whole array, without padding.
        itemsize: bytes of an element.
    """
    chunk = [max(1, min(b, n)) for b, n in zip(block, shape)]
    is_split = [b < n for b, n in zip(block, shape)]
    while math.prod(chunk) * itemsize > MAX_CHUNK_BYTES:
        dims = sorted(range(len(chunk)), key=lambda dim: (-chunk[dim], dim))
        for dim in dims:
            smaller = _smaller(chunk[dim], block[dim], must_divide=is_split[dim])
            if smaller < chunk[dim]:
                chunk[dim] = smaller
                break
        else:
            break
    return tuple(chunk)


def _smaller(chunk: int, block: int, *, must_divide: bool) -> int:
    """About half of a chunk's size along a dim; a divisor of the block's where it is split."""
    if not must_divide:
        return -(-chunk // 2)
    return next(size for size in range(chunk // 2, 0, -1) if block % size == 0) if chunk > 1 else 1


def in_chunks(index: Sequence[slice], chunks: Sequence[int]) -> list[tuple[slice, ...]]:
    """A block in parts of which each lies in one chunk."""
    parts: list[tuple[slice, ...]] = [()]
    for s, size in zip(index, chunks):
        starts = range(s.start, s.stop, size) or [s.start]
        parts = [(*p, slice(a, min(a + size, s.stop))) for p in parts for a in starts]
    return parts


def relative(part: Sequence[slice], of: Sequence[slice]) -> tuple[slice, ...]:
    """A part of a block by slices of that block."""
    return tuple(slice(p.start - s.start, p.stop - s.start) for p, s in zip(part, of))
