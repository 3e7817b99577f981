"""Chunks that bound the transient memory of large values on TPUs.

Each chunk waits for the last but one before it, so that one is computed while another is sent.
"""

from collections.abc import Sequence

import jax

# Large enough that sending a chunk takes longer than its latency, and small beside a model. Values
# of more than eight such chunks belong to larger models, and have larger chunks: of 64 MiB, the
# gradients of Llama 70B's layers over 64 devices would be 4,200 chunks, with two thirds of all
# operations that XLA fuses.
LARGEST_BYTES = 64 << 20
_MOST = 8
REGISTER = 128


def count(size: int, num_bytes: int) -> int:
    """The smallest number of equal chunks, each a multiple of a register, that are small enough.

    Args:
        size: the size of the dim that is split into chunks; 1 chunk if it is no multiple of a
            register.
        num_bytes: the bytes of the value.
    """
    registers, rest = divmod(size, REGISTER)
    if rest or num_bytes <= LARGEST_BYTES:
        return 1
    counts = [count for count in range(1, registers + 1) if registers % count == 0]
    largest = max(LARGEST_BYTES, num_bytes // _MOST)
    return next((c for c in counts if num_bytes // c <= largest), registers)


def wait(operands: Sequence[jax.Array], made: list[jax.Array]) -> list[jax.Array]:
    """The operands of the next chunk, after a barrier for the last but one of those made so far."""
    if len(made) < 2:
        return [*operands]
    own, made[-2] = jax.lax.optimization_barrier(([*operands], made[-2]))
    return own
