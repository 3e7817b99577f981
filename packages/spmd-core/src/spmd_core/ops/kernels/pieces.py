"""In how many pieces a TPU makes what is large on each device only for a moment.

On TPUs a step has to fit. Each piece waits for the one before the last: while one is sent, the next
one is computed.
"""

from collections.abc import Sequence

import jax

# As large as keeps the transfer of a piece longer than its start, and small beside a model.
LARGEST_BYTES = 64 << 20
REGISTER = 128


def count(size: int, num_bytes: int) -> int:
    """The smallest number of equal pieces, of whole registers, that are small enough.

    Args:
        size: of the dim that is cut; one that is not whole registers is not.
        num_bytes: of what is cut.
    """
    registers, rest = divmod(size, REGISTER)
    if rest or num_bytes <= LARGEST_BYTES:
        return 1
    counts = [count for count in range(1, registers + 1) if registers % count == 0]
    return next((c for c in counts if num_bytes // c <= LARGEST_BYTES), registers)


def wait(operands: Sequence[jax.Array], made: list[jax.Array]) -> list[jax.Array]:
    """The operands of the next piece, behind the last but one of those that are made."""
    if len(made) < 2:
        return [*operands]
    own, made[-2] = jax.lax.optimization_barrier(([*operands], made[-2]))
    return own
