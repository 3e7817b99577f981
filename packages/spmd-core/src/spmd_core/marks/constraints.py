"""Records constraints: values equal to others, in a given layout."""

from typing import Any

from spmd_core.graph.storage import Storage, read
from spmd_core.graph.strides import is_dense
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.ops.kernels.traits import SAME
from spmd_core.program.mark_names import MARK_SHARDING
from spmd_core.recording.calls import known
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def constrained(
    value: Value,
    sharding: Sharding,
    name: str = MARK_SHARDING,
    *,
    along: tuple[int, ...] | None = None,
    summed_over: tuple[int, ...] | None = None,
) -> Value:
    """The value after a mark; see `Entry` for `along` and `summed_over`.

    Call it under the graph lock.
    """
    entry = mark_entry(value.spec, sharding, name, along=along, summed_over=summed_over)
    return Value(entry, (value,), ())


def mark_entry(
    spec: Spec,
    sharding: Sharding,
    name: str = MARK_SHARDING,
    *,
    along: tuple[int, ...] | None = None,
    summed_over: tuple[int, ...] | None = None,
) -> Entry:
    """The operation that marks a tensor of this spec; see `Entry` for `along` and `summed_over`."""
    return known(
        (name, spec, sharding, along, summed_over),
        lambda: Entry(
            name,
            _identity,
            (spec,),
            sharding=sharding,
            along=along,
            summed_over=summed_over,
            traits=SAME,
        ),
    )


def constrained_copy(
    x: XLAShardedTensor,
    sharding: Sharding,
    name: str = MARK_SHARDING,
    *,
    along: tuple[int, ...] | None = None,
    summed_over: tuple[int, ...] | None = None,
) -> Storage:
    """A new storage of a tensor's value after a mark. Call it under the graph lock."""
    spec = x._handle.spec
    if not is_dense(spec.shape, spec.strides):
        # An expanded gradient, for instance, whose copy is written to when gradients are added up.
        spec = Spec.contiguous(spec.shape, spec.dtype)
    value = constrained(read(x._handle), sharding, name, along=along, summed_over=summed_over)
    return Storage(value, spec)


def _identity(context: Any, inputs: list[Any], numbers: list[Any]) -> list[Any]:
    return inputs
