"""Writes a new value to a storage, back along the chain of views that it is written through."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd_core.graph.storage import Handle, Link, Storage, View
from spmd_core.graph.strides import is_dense, overlaps
from spmd_core.graph.values import Entry, Spec, Value
from spmd_core.ops import registry
from spmd_core.ops.kernels.blocks import apart
from spmd_core.recording.calls import known
from spmd_core.recording.views import lowering_of, strided_link, strided_view


def write(handle: Handle, value: Value) -> None:
    """Makes `value` the handle's value; if the handle is a view, by a write to its storage.

    Raises:
        RuntimeError: several elements of the view share one memory location.
    """
    if isinstance(handle, Storage):
        handle.write(value)
        return
    spec, storage = handle.spec, handle.storage
    if overlaps(spec.shape, spec.strides):
        raise RuntimeError(
            "a write needs every element at its own place; in this view of shape "
            f"{spec.shape} and strides {spec.strides} several elements share "
            "one memory location. clone() the tensor before writing to it."
        )
    written = value
    if isinstance(handle.base, View) and any(
        overlaps(v.spec.shape, v.spec.strides) for v in handle.chain()
    ):
        # A view in between repeats elements (`x.expand(3, 4)[0]`), so the value cannot be written
        # back through it. This view has no repeated elements: write to its own memory locations.
        link = strided_link(handle, spec.shape, spec.strides, handle.offset)
        written = Value(_view_write_entry(link, storage.spec), (storage.value, written), ())
    else:
        view: Handle = handle
        while isinstance(view, View):
            base, link = view.base, view.link
            before = base.value if isinstance(base, Storage) else base.current()
            written = Value(
                link.entry.view_write or _view_write_entry(link, base.spec),
                (before, written),
                link.numbers,
            )
            view = base
    storage.write(written)
    handle.value, handle.version = value, storage.version


def write_one_value(handle: Handle, value: Value) -> None:
    """`write` for an operation that writes the same value to every element.

    Elements of the view may then share memory, as those of `x.expand(3, 4)` do. A location gets the
    value if any element there did.
    """
    spec, offset = handle.spec, handle.offset
    if isinstance(handle, Storage) or not overlaps(spec.shape, spec.strides):
        write(handle, value)
        return
    length = handle.storage.spec.num_bytes // spec.dtype.itemsize
    memory = strided_view(handle, (length,), (1,), 0)
    merge = known(
        ("merge", spec, offset, length),
        lambda: Entry(
            "write.changed", partial(_set_changed, spec, offset), (memory.spec,), replaces=(0,)
        ),
    )
    write(memory, Value(merge, (memory.current(), handle.current(), value), ()))


def _set_changed(
    spec: Spec, offset: int, context: registry.Context, inputs: list[Any], numbers: list[Any]
) -> list[Any]:
    """The memory under a view with the view's changed elements.

    The inputs are the memory, and the view's old and new elements.
    """
    memory, old, new = inputs
    positions = jnp.full(spec.shape, offset)
    for dim, step in enumerate(spec.strides):
        positions = positions + step * lax.broadcasted_iota(np.int64, spec.shape, dim)
    positions = jnp.where(_differ(old, new), positions, memory.size)
    return [memory.at[positions].set(apart(new), mode="drop")]


def _differ(a: Any, b: Any) -> Any:
    """Whether elements differ in their bits; -0.0 differs from 0.0, and a NaN not from itself."""
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return _differ(a.real, b.real) | _differ(a.imag, b.imag)
    if jnp.issubdtype(a.dtype, jnp.floating):
        bits = np.dtype(f"uint{8 * a.dtype.itemsize}")
        a, b = (lax.bitcast_convert_type(x, bits) for x in (a, b))
    return a != b


def refuse_partial_overlap(target: Handle, source: Handle) -> None:
    """Raises torch's error for an in-place operation on partially overlapping tensors.

    As c10's `get_overlap_status`, for two tensors of one storage.
    """
    a, b = target.spec, source.spec
    if (
        0 in a.shape
        or 0 in b.shape
        or not is_dense(a.shape, a.strides)
        or not is_dense(b.shape, b.strides)
    ):
        return
    first, other = target.offset * a.dtype.itemsize, source.offset * b.dtype.itemsize
    last, other_last = first + a.num_bytes, other + b.num_bytes
    if (first, last) == (other, other_last) and a.strides == b.strides:
        return
    if first < other_last and other < last:
        raise RuntimeError(
            "some elements of the input tensor and the written-to tensor refer to a single memory "
            "location, but are not the same element; got a "
            f"written tensor of shape {a.shape}, strides {a.strides}, "
            f"at element {target.offset} of the storage, and an input of shape {b.shape}, "
            f"strides {b.strides}, at element {source.offset}. "
            "clone() the input before the operation."
        )


def _view_write_entry(link: Link, base: Spec) -> Entry:
    """The operation that writes a changed view back into its base."""
    found = link.entry.view_write
    if found is None:
        func, args, kwargs = link.call
        place = registry.find_view_write(func) or _write_by_position(func)

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [place(inputs[0], inputs[1], *args, **kwargs)]

        name = f"write.{link.entry.name}"
        found = link.entry.view_write = Entry(name, kernel, (base,), replaces=(0,))
        if link.entry.key is not None:
            found.key = ("write", link.entry.key)
    return found


def _write_by_position(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A write for any view that only selects and reorders elements.

    The view operation is applied to the positions of the base's elements; the results are set.
    """
    lowering = lowering_of(func)

    def place(base: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
        positions = jnp.arange(base.size).reshape(base.shape)
        context = registry.Context((registry.Out(view.shape, torch.int64),), "cpu")
        chosen = lowering.function(context, positions, *args, **kwargs)
        flat = base.reshape(-1).at[chosen.reshape(-1)].set(apart(view.reshape(-1)))
        return flat.reshape(base.shape)

    return place
