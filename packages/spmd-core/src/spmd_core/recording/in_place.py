"""Records in-place operations: the functional form, whose results are written to the tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.errors import DeviceMismatchError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, View
from spmd_core.graph.values import Entry, OpResult, Spec, Value
from spmd_core.ops import registry
from spmd_core.recording import cpu_kernels, inference, random_stream, schema
from spmd_core.recording.calls import CallSchema, Handler, look_up, mixed, new_entry
from spmd_core.recording.stand_ins import leaves_of
from spmd_core.recording.writes import refuse_partial_overlap, write, write_one_value
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of

aten = torch.ops.aten
# In-place operations that write the same value to every element they write, and under which
# condition.
_WRITES_ONE_VALUE: dict[Any, Callable[[Sequence[Any]], bool]] = {
    **dict.fromkeys(
        (
            aten.fill_.Scalar,
            aten.fill_.Tensor,
            aten.zero_.default,
            aten.masked_fill_.Scalar,
            aten.masked_fill_.Tensor,
            aten.index_fill_.int_Scalar,
            aten.index_fill_.int_Tensor,
        ),
        lambda args: True,
    ),
    aten.index_put_.default: lambda args: args[2].numel() == 1 and not any(args[3:4]),
}


def refuse_overlap(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raises torch's error for an operation whose inputs share memory with what it writes.

    Some operations accept an input that is the written tensor itself.
    """
    if cpu_kernels.refuse(func, args, kwargs):
        return
    target = args[0]._handle
    for a in leaves_of(args[1:]):
        if isinstance(a, XLAShardedTensor) and a._handle.storage is target.storage:
            refuse_partial_overlap(target, a._handle)


def _share(storage: Storage, given: Sequence[Any]) -> bool:
    """Whether a tensor of a list is in this storage."""
    return any(a.__class__ is XLAShardedTensor and a._handle.storage is storage for a in given)


def in_place_handler(func: torch._ops.OpOverload, lowering: registry.Lowering) -> Handler:
    """Records `x.op_(...)` as its functional form, which has a lowering, and a write."""

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        inference.infer(
            func, args, kwargs, spec_of
        )  # raises what torch raises for a result that does not fit
        result = inference.infer(lowering.overload, args, kwargs, spec_of)
        into = spec_of(args[0])
        written = Spec.contiguous(into.shape, into.dtype)
        return new_entry(lowering, result, args, kwargs, kinds, into=written, replaces=(0,))

    call = CallSchema(func, lowering.static, make)
    random = lowering.random
    writes_one_value = _WRITES_ONE_VALUE.get(func)
    accepted: set[Any] = set()  # (entry, positions of the inputs that are the written tensor)
    # Defaults of arguments that the functional form has no default for: `bernoulli_()` is
    # `bernoulli(p=0.5)`.
    given = {a.name: a for a in func._schema.arguments}
    needed = [a.name for a in lowering.overload._schema.arguments if not a.has_default_value()]
    defaults = [given[name].default_value for name in needed if given[name].has_default_value()]
    num_needed = len(needed)

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if defaults and len(args) < num_needed and not kwargs.keys() & set(needed):
            args = (*args, *defaults)
        if target.__class__ is not XLAShardedTensor:
            raise DeviceMismatchError(
                f"{func} cannot write a tensor on {target.device} from tensors on xla:0. "
                "Move it with .to('xla'), or the others with .cpu()."
            )
        handle = target._handle
        with lock:
            is_input = False
            for a in args[1:]:
                if a.__class__ is XLAShardedTensor:
                    other = a._handle
                    if other is handle:
                        is_input = True
                    elif (
                        other.__class__ is View or handle.__class__ is View
                    ) and other.storage is handle.storage:
                        refuse_overlap(func, args, kwargs)
                elif a.__class__ is list and _share(handle.storage, a):
                    refuse_overlap(func, args, kwargs)
            entry, inputs, numbers = look_up(call, args, kwargs)
            if is_input:
                same = (entry, *[getattr(a, "_handle", None) is handle for a in args])
                if same not in accepted:
                    refuse_overlap(func, args, kwargs)
                    accepted.add(same)
            if random:
                numbers.append(random_stream.draw(kwargs.get("generator")))
                if random_stream.position.make is not None:
                    entry, inputs = mixed(entry, inputs)
            if isinstance(handle, Storage):
                handle.write(Value(entry, inputs, numbers))
            elif writes_one_value is not None and writes_one_value(args):
                write_one_value(handle, Value(entry, inputs, numbers))
            else:
                write(handle, Value(entry, inputs, numbers))
        return target

    return record


def _positions(
    facts: schema.Schema, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """The positions of the written tensors among a call's inputs, in the order of the results."""
    positions, count = {}, 0
    for name, given in facts.by_name(args, kwargs).items():
        tensors = [a for a in leaves_of([given]) if isinstance(a, torch.Tensor)]
        of_name = range(count, count + len(tensors))
        positions[name], count = of_name, of_name.stop
    return tuple(position for name in facts.written for position in positions[name])


def _kept(facts: schema.Schema, args: Sequence[Any], kwargs: dict[str, Any]) -> range:
    """The positions of results that are the written tensors as they were.

    A fused optimizer writes gradients only if it divides them by a scale. Gradients of a stack of
    layers are then views of one array still, of which no row is copied.
    """
    start = 0
    given = facts.by_name(args, kwargs)
    for name in facts.written:
        length = len(given[name]) if isinstance(given[name], (list, tuple)) else 1
        if name == "grads" and given.get("grad_scale") is None:
            return range(start, start + length)
        start += length
    return range(0)


def several_written_handler(func: torch._ops.OpOverload, lowering: registry.Lowering) -> Handler:
    """Records an operation that writes several arguments, such as `_fused_adamw_(params, ...)`.

    One recorded operation gives each tensor of every written argument its new value.
    """
    facts = schema.of(func)

    def written(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        given = facts.by_name(args, kwargs)
        return [
            t
            for name in facts.written
            for t in (given[name] if isinstance(given[name], (list, tuple)) else [given[name]])
        ]

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        # torch has no meta kernels for these operations.
        lengths = {
            name: len(a)
            for name, a in facts.by_name(args, {}).items()
            if isinstance(a, (list, tuple)) and a
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"{func} takes lists of one length, or empty ones; got {lengths}. "
                "Give one tensor in each list for each parameter."
            )
        cpu_kernels.refuse(func, args, kwargs)
        return new_entry(
            lowering,
            [inference.meta_like(spec_of(t)) for t in written(args, kwargs)],
            args,
            kwargs,
            kinds,
            replaces=_positions(facts, args, kwargs),
        )

    call = CallSchema(func, lowering.static, make, lowering.numbers)

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            targets = written(args, kwargs)
            entry, inputs, numbers = look_up(call, args, kwargs)
            node = Value(entry, inputs, numbers)
            kept = _kept(facts, args, kwargs)
            for i, target in enumerate(targets):
                if i not in kept:
                    write(target._handle, OpResult(node, i))
        return args[0] if func._schema.returns else None

    return record
