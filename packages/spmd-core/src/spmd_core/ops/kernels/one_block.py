"""Attention as one block without a loop: to ask for the dims of its kernel, not to compute it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Whether `flash` makes one block of any sequence.
# Guarded by: the context. Cleared by: the end of `in_one_block`.
current: ContextVar[bool] = ContextVar("in_one_block", default=False)


@contextmanager
def in_one_block() -> Iterator[None]:
    """Inside, attention is lowered without a loop over blocks, whose dims no rule tells.

    The scores of all queries and keys are one array then, for which devices have no memory.
    """
    token = current.set(True)
    try:
        yield
    finally:
        current.reset(token)
