"""Views and writes: a view is a link of a chain over a shared storage, and a write goes back along the chain."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from spmd_core import inference, random_stream, schema
from spmd_core.errors import DeviceMismatchError, UnsupportedOpError
from spmd_core.graph import Entry, Spec, Value
from spmd_core.ops import registry
from spmd_core.recording import NO_KWARGS, Call, Handler, entries, look_up, new_entry, remember
from spmd_core.storage import Handle, Storage, View, lock
from spmd_core.tensor import XLAShardedTensor, spec_of, wrap

aten = torch.ops.aten


def _lowering(func: torch._ops.OpOverload) -> registry.Lowering:
    found = registry.find(func)
    assert found is not None, f"{func} has no lowering"
    return found


def write(handle: Handle, value: Value) -> None:
    """Makes `value` the handle's value, through the chain where it is a view."""
    if isinstance(handle, Storage):
        handle.write(value)
        return
    spec = handle.spec
    if _overlaps(spec):
        raise RuntimeError(
            f"a write needs every element at its own place; in this view of shape {spec.shape} and strides {spec.strides} several elements share "
            "one memory location. clone() the tensor before writing to it."
        )
    bases = handle.intermediate_values()
    written = value
    for entry, base in zip(reversed(handle.chain), reversed(bases)):
        written = Value(_view_write_entry(entry, base.spec), (base, written), ())
    handle.storage.write(written)
    handle.value, handle.version = value, handle.storage.version


def _overlaps(spec: Spec) -> bool:
    """Whether two elements lie at one place: in the order of strides, a step within what the smaller dims span."""
    span = 0
    for step, n in sorted(zip(spec.strides, spec.shape)):
        if n > 1:
            if step <= span:
                return True
            span += (n - 1) * step
    return False


def view_handler(lowering: registry.Lowering) -> Handler:
    """Records a view of its first argument."""
    func = lowering.overload

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        result = inference.infer(func, args, kwargs, spec_of)
        entry = new_entry(lowering, result, args, kwargs, kinds)
        base = spec_of(args[0])
        spec = entry.outs[0]
        entry.spec = Spec.of(spec.shape, spec.strides, spec.dtype, base.offset + spec.offset)
        entry.view_call = (func, tuple(args[1:]), inference.without_placement(kwargs))
        return entry

    # A view's numbers are indices: all of them are static.
    call = Call(func, frozenset(schema.of(func).names), make)

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            handle = args[0]._handle
            entry, inputs, _ = look_up(call, args, kwargs)
            value = Value(entry, inputs, ())
            if isinstance(handle, Storage):
                return wrap(View(handle, (entry,), entry.spec, value))
            return wrap(View(handle.storage, (*handle.chain, entry), entry.spec, value))

    return record


def _view_write_entry(entry: Entry, base: Spec) -> Entry:
    """The operation that puts a written view back into its base."""
    found = entry.view_write
    if found is None:
        func, args, kwargs = entry.view_call
        place = registry.find_view_write(func) or _write_by_position(func)

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [place(inputs[0], inputs[1], *args, **kwargs)]

        found = entry.view_write = Entry(f"write.{entry.name}", kernel, (base,))
    return found


def _write_by_position(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A write for any view that only selects and reorders: view the positions, and set those."""
    lowering = _lowering(func)

    def place(base: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
        positions = jnp.arange(base.size).reshape(base.shape)
        context = registry.Context((registry.Out(view.shape, torch.int64),), "cpu")
        chosen = lowering.function(context, positions, *args, **kwargs)
        return base.reshape(-1).at[chosen.reshape(-1)].set(view.reshape(-1)).reshape(base.shape)

    return place


def alias(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`detach` and its kin: another tensor over the same handle."""
    return wrap(args[0]._handle)


def pieces_handler(func: Any) -> Handler:
    """`split`, `split_with_sizes`, `unbind`: each piece is a view of its own."""
    select, cut = view_handler(_lowering(aten.select.int)), view_handler(_lowering(aten.slice.Tensor))

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        x = args[0]
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        dim = given.get("dim", 0)
        dim = dim % x.dim() if x.dim() else dim
        metas = inference.infer(func, args, kwargs, spec_of)
        if func is aten.unbind.int:
            return [select((x, dim, i), NO_KWARGS) for i in range(len(metas))]
        pieces, start = [], 0
        for meta in metas:
            pieces.append(cut((x, dim, start, start + meta.shape[dim]), NO_KWARGS))
            start += meta.shape[dim]
        return pieces

    return handler


def as_strided(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view by strides: over the storage itself, in the order of its memory."""
    x, size, strides = args[0], tuple(args[1]), tuple(args[2])
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    handle = x._handle
    storage, base = handle.storage, handle.storage.spec
    offset = handle.spec.offset if offset is None else offset
    last = offset + sum((n - 1) * step for n, step in zip(size, strides)) if all(size) else 0
    if any(step < 0 for step in strides) or last >= max(base.num_elements, 1):
        raise RuntimeError(
            f"as_strided must stay inside the storage; size {size}, strides {strides}, offset {offset} reach element {last} of {base.num_elements}. "
            "Use sizes and strides of the tensor's own storage."
        )
    order = sorted(range(len(base.shape)), key=lambda d: -base.strides[d])
    dense = Spec.contiguous(tuple(base.shape[d] for d in order), base.dtype)
    if any(n > 1 and base.strides[d] != step for d, n, step in zip(order, dense.shape, dense.strides)):
        raise UnsupportedOpError(
            f"as_strided needs a storage without gaps; this one has shape {base.shape} and strides {base.strides}. Call contiguous() first."
        )
    key = ("as_strided", base, size, strides, offset)
    entry = entries.get(key)
    if entry is None:
        spec = Spec.of(size, strides, base.dtype, offset)
        function = _lowering(aten.as_strided.default).function
        back = registry.find_view_write(aten.as_strided.default)
        assert back is not None
        shape, inverse = dense.shape, tuple(order.index(d) for d in range(len(order)))

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [function(context, inputs[0].transpose(order), size, strides, offset)]

        def write_back(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [back(inputs[0].transpose(order), inputs[1], size, strides, offset).reshape(shape).transpose(inverse)]

        entry = Entry("aten::as_strided", kernel, (spec,))
        entry.view_write = Entry("write.aten::as_strided", write_back, (base,))
        remember(key, entry)
    with lock:
        return wrap(View(storage, (entry,), entry.spec, Value(entry, (storage.value,), ())))


def in_place_handler(func: torch._ops.OpOverload, lowering: registry.Lowering) -> Handler:
    """`x.op_(...)` where the functional form has a lowering: one recorded operation, then a write."""

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        inference.infer(func, args, kwargs, spec_of)  # raises what torch raises for a result that does not fit
        result = inference.infer(lowering.overload, args, kwargs, spec_of)
        into = spec_of(args[0])
        return new_entry(lowering, result, args, kwargs, kinds, into=Spec.contiguous(into.shape, into.dtype))

    call = Call(func, lowering.static, make)
    random = lowering.random
    # An argument that may be left out here but not in the functional form: `bernoulli_()` is `bernoulli(p=0.5)`.
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
                f"{func} cannot write a tensor on {target.device} from tensors on xla:0. Move it with .to('xla'), or the others with .cpu()."
            )
        with lock:
            entry, inputs, numbers = look_up(call, args, kwargs)
            if random:
                numbers.append(random_stream.draw(kwargs.get("generator")))
            write(target._handle, Value(entry, inputs, numbers))
        return target

    return record
