"""Discrete Fourier transforms of split arrays, in a form that XLA gets right.

XLA's partitioner aborts the process on transforms over some dims that are split unevenly, and its
CPU backend refuses an operand that a collective has left in another layout than row-major.
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from spmd_core import releases

_layout = releases.jax_module("jax.experimental.layout", "Layout", "with_layout_constraint")


def _row_major(x: jax.Array, platform: str) -> jax.Array:
    """`x` in row-major layout on a CPU, whose transforms need it; elsewhere unchanged.

    This workaround ends when XLA's CPU backend converts the layout itself.
    """
    if platform != "cpu":
        return x
    return _layout.with_layout_constraint(x, _layout.Layout(tuple(range(x.ndim))))


def transform(
    x: jax.Array,
    kind: lax.FftType,
    lengths: Sequence[int],
    *,
    replicate_last_dims: Callable[[jax.Array, int], jax.Array],
    platform: str,
) -> jax.Array:
    """The transform of the last dims, which are replicated; inverse transforms are normalised.

    Args:
        x: the operand.
        kind: the kind of the transform.
        lengths: the lengths of the transformed dims.
        replicate_last_dims: as in `registry.Context`; can go when the partitioner is correct there.
        platform: as in `registry.Context`.
    """
    num = len(lengths)
    x = _row_major(replicate_last_dims(x, num), platform)
    return replicate_last_dims(_row_major(lax.fft(x, kind, lengths), platform), num)
