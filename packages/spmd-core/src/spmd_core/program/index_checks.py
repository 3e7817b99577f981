"""`config.check_indices`: an index outside its dim, which a program cannot raise, is raised later.

A program that is lowered with the checks returns, as its token, the position of its first operation
with such an index. The next read on the host reads the tokens of all programs since the last one.
"""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from spmd_core.errors import IndexRangeError
from spmd_core.program.program_graph import Graph

# The tokens that no read has checked yet, with the program's name and graph.
_unread: deque[tuple[jax.Array, str, Graph]] = deque()
# Beyond this number of programs without a read, the oldest is checked and dropped.
_MAX_UNREAD = 256


def first_offender(found: list[tuple[int, jax.Array]]) -> jax.Array:
    """The position of the first operation with an index outside its dim, or -1, as int32.

    Args:
        found: for each check, the operation's position and whether it has such an index.
    """
    last = np.iinfo(np.int32).max
    positions = [jnp.where(bad, position, last) for position, bad in found]
    first = jnp.stack([jnp.asarray(last), *positions]).min()
    return jnp.where(first == last, -1, first).astype(np.int32)


def add(token: jax.Array, name: str, graph: Graph) -> None:
    """Keeps a started program's token for the next read."""
    _unread.append((token, name, graph))
    if len(_unread) > _MAX_UNREAD:
        # A cut must not raise for another program, so the earliest that found something stays.
        del _unread[int(_position(_unread[0]) >= 0)]


def forget() -> None:
    """Drops the tokens of programs that were not checked yet."""
    _unread.clear()


def raise_if_found() -> None:
    """Raises for the first operation of the earliest program with an index outside its dim.

    Waits for the programs since the last call.

    Raises:
        IndexRangeError: there is one. Later programs are checked by the next call.
    """
    while _unread:
        oldest = _unread.popleft()
        position = _position(oldest)
        if position >= 0:
            raise IndexRangeError(_describe(position, *oldest[1:]))


def _position(kept: tuple[jax.Array, str, Graph]) -> int:
    return int(np.asarray(kept[0]))


def _describe(position: int, name: str, graph: Graph) -> str:
    node = graph.nodes[position]
    where = "" if node.origin is None else f", recorded at {node.origin},"
    advice = "" if node.origin else " Set config.record_source_lines = True to get its line."
    shapes = ", ".join(repr(spec) for spec in node.entry.outs)
    return (
        "an index must lie inside the dim that it indexes; operation "
        f"{position} of {name}, {node.entry.name} -> {shapes}{where} got one that does not. "
        "Its reads took the nearest element and its writes were dropped, so the values computed "
        f"from it are wrong. Correct the index.{advice}"
    )
