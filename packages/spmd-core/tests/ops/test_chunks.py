"""ops/kernels/chunks.py: the number of chunks of large values."""

import pytest

from spmd_core.ops.kernels import chunks

MIB = 1 << 20


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("size", "num_bytes", "expected"),
    [
        (4096, 64 * MIB, 1),
        (4096, 65 * MIB, 2),
        (4096, 256 * MIB, 4),
        (28672, 8192 * 28672 * 4, 8),  # Llama 70B's, of 896 MiB: larger chunks, not more of them
        (32000, 8192 * 32000 * 4, 10),  # of 250 registers, which 8 does not divide
        (128 * 7, 896 * MIB, 7),
        (100, 896 * MIB, 1),  # no multiple of a register
    ],
)
def test_how_many(size: int, num_bytes: int, expected: int) -> None:
    assert chunks.count(size, num_bytes) == expected
