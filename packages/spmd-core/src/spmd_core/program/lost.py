"""What a program that failed leaves: buffers that it took over, and writes to take back."""

import jax

from spmd_core.errors import ProgramError
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import Row
from spmd_core.graph.storage import take_failed
from spmd_core.graph.values import Value
from spmd_core.runtime.abstract import AbstractArray


def roll_back() -> int:
    """Drops pending writes whose programs failed in this thread.

    The tensors then have the values that they had after the last cut. This is for code that catches
    an error and continues, for instance with a smaller batch after memory ran out. Without this
    call the writes stay pending, and whatever reads them fails again. New tensors, which have no
    earlier value, stay pending. Does not wait.

    Returns:
        The number of tensors that have an earlier value again.
    """
    with lock:
        count = 0
        for storage in take_failed():
            before = storage.committed
            if before is None or _is_deleted(before):
                storage.fail()
            else:
                storage.write(before)
                count += 1
        return count


def refuse_lost(leaf: Value) -> None:
    """Raises ProgramError for a value whose buffer a program took over, and then failed."""
    if _is_deleted(leaf):
        raise ProgramError(
            f"the data of a {leaf.spec!r} tensor was donated to a program that failed after "
            "its start, so it is lost with all that was computed from it. Load these tensors "
            "again, for instance from a checkpoint."
        )


def _is_deleted(value: Value) -> bool:
    """Whether the value's buffer was donated to a program that failed."""
    data = value.data.stack.value.data if value.data.__class__ is Row else value.data
    return isinstance(data, (jax.Array, AbstractArray)) and data.is_deleted()
