"""The door to jax: a tensor as a jax array and back, and any jax function as one recorded operation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from torch.utils import _pytree as pytree

from spmd_core import dtypes
from spmd_core.errors import DeviceMismatchError
from spmd_core.graph.storage import Storage, lock, read
from spmd_core.graph.values import Entry, Part, Spec, Value
from spmd_core.program import execution
from spmd_core.recording.calls import entries, remember
from spmd_core.runtime.placement import Placement, default_device_ids, replicated
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


def to_jax(t: torch.Tensor) -> jax.Array:
    """The tensor's values as a jax array, without a copy, laid out over the devices as the tensor is. Runs what is pending; does not wait.

    A later in-place update of the tensor may take over the buffer: jax then says that the array was deleted. A tensor whose shards are padded, and a
    view, are copied. 64-bit dtypes are kept; jax computes with them as its own `jax_enable_x64` says.

    Raises:
        DeviceMismatchError: not a tensor on device `xla`.
    """
    handle = _device_tensor(t, "to_jax")._handle
    if not isinstance(handle, Storage):
        handle = _device_tensor(t.detach().clone(), "to_jax")._handle.storage
    array = execution.place(handle)
    if array.shape == handle.spec.shape:
        return array
    with jax.enable_x64(True):
        return array[tuple(slice(n) for n in handle.spec.shape)]


def from_jax(array: jax.Array) -> XLAShardedTensor:
    """A jax array as a tensor on the device, without a copy where the array has a NamedSharding; else replicated over the devices.

    An in-place update of the tensor may take over the array's buffer. Does not wait.

    Raises:
        TypeError: not a jax array, or of a dtype that torch does not have.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"from_jax takes a computed jax.Array; got {type(array).__name__}. Use torch.as_tensor for host data, call_jax inside of a trace."
        )
    spec = Spec.contiguous(tuple(array.shape), dtypes.to_torch(array.dtype))
    if not isinstance(array.sharding, NamedSharding):
        with jax.enable_x64(True):
            array = jax.device_put(array, replicated(default_device_ids()))
    return wrap(Storage.of_leaf(spec, array, Placement.of(array.sharding, None)))


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, a jax function, as one operation of the program: partitioned, fused and differentiated like every other.

    Tensors on device `xla`, anywhere in nested lists, tuples and dicts, become jax arrays of the same shape and dtype; everything else is passed as
    it is, and is part of the program. The function is traced once for each combination of shapes, dtypes and other arguments. Define it once: a new
    function object, such as a lambda made at each call, is another operation and compiles again. Gradients are those of `jax.vjp`, any number of
    times. Does not wait for the device.

    Returns:
        What the function returns, its arrays as tensors.

    Raises:
        DeviceMismatchError: a tensor on another device.
        TypeError: an argument that is no tensor and cannot be hashed, or a result that is no array.

    Example:
        >>> import jax.numpy as jnp
        >>> call_jax(jnp.cumsum, torch.ones(4, device="xla"), axis=0).tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    static = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    try:
        call = entries.get(("jax", function, static, tree))
    except TypeError as error:
        raise TypeError(
            f"the arguments of a jax function are tensors or can be hashed; got {[type(leaf).__name__ for leaf in leaves]}: {error}"
        ) from None
    if call is None:
        call = _Call(function, static, tree)
        remember(("jax", function, static, tree), call)
    results, out_tree = _run(call, [_device_tensor(t, "call_jax") for t in tensors])
    return pytree.tree_unflatten(list(results), out_tree)


_TENSOR = object()


class _Call:
    """A jax function with everything bound but its arrays: a list of arrays in, a list of arrays out."""

    def __init__(self, function: Callable[..., Any], static: Sequence[Any], tree: Any) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._function, self._static, self._tree = function, static, tree
        self.out_tree: Any = None

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        given = iter(arrays)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in self._static], self._tree
        )
        results, self.out_tree = pytree.tree_flatten(self._function(*args, **kwargs))
        for result in results:
            if not isinstance(result, (jax.Array, np.ndarray, float, int, bool, complex)):
                raise TypeError(
                    f"a jax function returns arrays; {self.name} returned {type(result).__name__}. Return arrays in tuples, lists or dicts."
                )
        return [jax.numpy.asarray(result) for result in results]


class _Transposed:
    """The vector-Jacobian product of a call: its arrays and a cotangent for each inexact result in, a gradient for each inexact array out."""

    def __init__(self, call: Any, num_arrays: int) -> None:
        self.name, self._call, self._num_arrays = f"{call.name}.vjp", call, num_arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        inputs, cotangents = arrays[: self._num_arrays], iter(arrays[self._num_arrays :])
        results, pull = jax.vjp(self._call, *inputs)
        # A result of integers has a cotangent without values.
        full = [
            next(cotangents) if _is_inexact(r.dtype) else np.zeros(r.shape, jax.dtypes.float0)
            for r in results
        ]
        return [g for x, g in zip(inputs, pull(full)) if _is_inexact(x.dtype)]


def _is_inexact(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.inexact))


def _run(call: Any, tensors: list[XLAShardedTensor]) -> tuple[tuple[torch.Tensor, ...], Any]:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results = _Differentiated.apply(call, *tensors)
    else:
        results = _record(call, tensors)
    return results, getattr(call, "out_tree", None)


def _record(call: Any, tensors: Sequence[XLAShardedTensor]) -> tuple[torch.Tensor, ...]:
    with lock:
        specs = tuple(t._handle.spec for t in tensors)
        entry = entries.get(("jax", call, specs))
        if entry is None:
            entry = _entry(call, specs)
            remember(("jax", call, specs), entry)
        node = Value(entry, tuple(read(t._handle) for t in tensors), ())
        return tuple(wrap(Storage(Part(node, i), spec)) for i, spec in enumerate(entry.outs))


def _entry(call: Any, specs: tuple[Spec, ...]) -> Entry:
    arrays = [jax.ShapeDtypeStruct(spec.shape, dtypes.to_jax(spec.dtype)) for spec in specs]
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(call)(*arrays)
    outs = tuple(
        Spec.contiguous(aval.shape, dtypes.to_torch(aval.dtype)) for aval in closed.out_avals
    )
    if not outs:
        raise TypeError(
            f"a jax function returns arrays; {call.name} returned none. Return what it computes."
        )
    run = jaxpr_as_fun(closed)
    return Entry(
        f"jax::{call.name}",
        lambda context, inputs, numbers: list(run(*inputs)),
        outs,
        structure=tuple(range(len(outs))),
    )


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: XLAShardedTensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.call = call
        results = _record(call, tensors)
        ctx.mark_non_differentiable(
            *(r for r in results if not (r.is_floating_point() or r.is_complex()))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        key = ("jax vjp", ctx.call, len(tensors))
        transposed = entries.get(key)
        if transposed is None:
            transposed = _Transposed(ctx.call, len(tensors))
            remember(key, transposed)
        # torch keeps the conjugate of jax's gradient of a complex number.
        cotangents = [
            g.conj().resolve_conj()
            for g in grads
            if g is not None and (g.is_floating_point() or g.is_complex())
        ]
        found, _ = _run(transposed, [*tensors, *cotangents])
        gradients = iter(found)
        return (
            None,
            *(
                next(gradients).conj() if t.is_floating_point() or t.is_complex() else None
                for t in tensors
            ),
        )


def _device_tensor(t: Any, what: str) -> XLAShardedTensor:
    if not isinstance(t, XLAShardedTensor):
        got = f"a tensor on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise DeviceMismatchError(
            f"{what} needs tensors on device 'xla'; got {got}. Move it first: t = t.to('xla')."
        )
    return t
