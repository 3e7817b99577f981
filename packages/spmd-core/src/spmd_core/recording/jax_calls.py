"""Interoperation with jax: tensors as jax arrays and back, jax functions as recorded operations."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding
from torch.utils import _pytree as pytree

from spmd_core import dtypes, releases
from spmd_core.arguments import require_callable
from spmd_core.graph.placement import Placement
from spmd_core.graph.storage import Storage
from spmd_core.graph.values import Entry, Spec
from spmd_core.program import execution
from spmd_core.recording.calls import known, record_own
from spmd_core.runtime import abstract
from spmd_core.runtime.abstract import AbstractArray
from spmd_core.runtime.jax_sharding import default_device_ids, replicated
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, device_tensor, wrap

_core = releases.jax_module("jax.extend.core", "jaxpr_as_fun")
_TENSOR = object()  # stands for a tensor among the bound arguments
_X64_DTYPES = (torch.int64, torch.uint64, torch.float64, torch.complex128)


def to_jax(t: torch.Tensor) -> jax.Array:
    """The tensor's values as a jax array with the tensor's sharding, without a copy.

    Runs what is pending; does not wait. A later in-place update of the tensor may take over the
    buffer: jax then reports that the array was deleted. A view, and a tensor whose shards are
    padded, are copied. 64-bit dtypes are kept; `jax_enable_x64` decides how jax computes with them.

    Raises:
        DeviceMismatchError: not a tensor on device `xla`.
        PlanReadError: in a plan.
    """
    handle = device_tensor(t, "to_jax")._handle
    if not isinstance(handle, Storage):
        handle = device_tensor(t.detach().clone(), "to_jax")._handle.storage
    array = execution.place(handle)
    if isinstance(array, AbstractArray):
        abstract.refuse("a tensor as a jax array")
    if array.shape == handle.spec.shape:
        return array
    with jax.enable_x64(True):
        return array[tuple(slice(n) for n in handle.spec.shape)]


def from_jax(array: jax.Array) -> XLAShardedTensor:
    """A jax array as a tensor on the device.

    An array with a NamedSharding is not copied; any other is replicated over the devices. An
    in-place update of the tensor may take over the array's buffer. Does not wait.

    Raises:
        TypeError: not a jax array, or of a dtype that torch does not have.
        ValueError: the array was deleted.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"from_jax takes a computed jax.Array; got {type(array).__name__}. "
            "Use torch.as_tensor for host data, call_jax inside of a trace."
        )
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"from_jax takes an array of numbers; got random keys of dtype {array.dtype}. "
            "Pass jax.random.key_data(keys)."
        )
    if array.is_deleted():
        raise ValueError(
            "from_jax takes an array that has its data; got a deleted one of shape "
            f"{tuple(array.shape)}, such as a jitted function that donates its argument leaves. "
            "Pass that function's result, or a copy made before."
        )
    spec = Spec.contiguous(tuple(array.shape), dtypes.to_torch(array.dtype))
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        sharding = replicated(default_device_ids())
        with jax.enable_x64(True):
            array = (
                abstract.array(spec.shape, array.dtype, sharding)
                if abstract.run()
                else jax.device_put(array, sharding)
            )
    return wrap(Storage.of_leaf(spec, array, Placement.of(sharding, None)))


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a jax function as one operation of the program.

    The operation is partitioned, fused and differentiated like every other. Tensors on device
    `xla`, anywhere in nested lists, tuples and dicts, become jax arrays of the same shape and
    dtype; every other argument is passed unchanged, as a constant of the program. The function is
    traced once for each combination of shapes, dtypes and other arguments. Define it once: a new
    function object, such as a lambda made at each call, is another operation and compiles again.
    Gradients are those of `jax.vjp`, of any order. Does not wait for the device.

    A function gives the dtypes that it gives in jax alone: `jnp.zeros(n)` is float32 and
    `jnp.arange(n)` int32, unless `jax_enable_x64` is set where `call_jax` is called. jax has
    int64, float64 and complex128 in that mode only, so with a tensor of one of these dtypes the
    function runs in it: no bit is lost, and `jnp.zeros(n)` is float64. Pass `ids.int()` in place of
    int64 ids for the defaults of 32 bits.

    Returns:
        What the function returns, with tensors in place of arrays.

    Raises:
        DeviceMismatchError: a tensor on another device.
        TypeError: `function` is none; an argument is neither a tensor nor hashable, or a result is
            not an array.

    Example:
        >>> import jax.numpy as jnp
        >>> call_jax(jnp.cumsum, torch.ones(4, device="xla"), axis=0).tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    require_callable("function", function)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    static = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    has_x64 = jax.config.read("jax_enable_x64") or any(t.dtype in _X64_DTYPES for t in tensors)
    try:
        call = known(
            ("jax", function, static, tree, has_x64),
            lambda: _BoundFunction(function, static, tree, has_x64=has_x64),
        )
    except TypeError as error:
        raise TypeError(
            "the arguments of a jax function are tensors or hashable; "
            f"got {[type(leaf).__name__ for leaf in leaves]}: {error}"
        ) from None
    results, out_tree = _run(call, [device_tensor(t, "call_jax") for t in tensors])
    return pytree.tree_unflatten(list(results), out_tree)


class _BoundFunction:
    """A jax function of arrays alone, with its other arguments bound; from a list to a list.

    Attributes:
        name: the function's.
        has_x64: whether the function runs in jax's x64 mode.
        out_tree: the structure of the function's result; set when it is first traced.
    """

    def __init__(
        self, function: Callable[..., Any], static: Sequence[Any], tree: Any, *, has_x64: bool
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.has_x64 = has_x64
        self._function, self._static, self._tree = function, static, tree
        self.out_tree: Any = None

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        given = iter(arrays)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in self._static], self._tree
        )
        with jax.enable_x64(self.has_x64):
            results, self.out_tree = pytree.tree_flatten(self._function(*args, **kwargs))
            for result in results:
                if not isinstance(result, (jax.Array, np.ndarray, float, int, bool, complex)):
                    raise TypeError(
                        f"a jax function returns arrays; {self.name} returned "
                        f"{type(result).__name__}. Return arrays in tuples, lists or dicts."
                    )
            return [jax.numpy.asarray(result) for result in results]


class _VectorJacobianProduct:
    """The vector-Jacobian product of a call.

    Takes the call's arrays and a cotangent for each inexact result; returns a gradient for each
    inexact array.
    """

    def __init__(self, call: "_Differentiable", num_arrays: int) -> None:
        self.name: str = f"{call.name}.vjp"
        self.has_x64: bool = call.has_x64
        self._call, self._num_arrays = call, num_arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        inputs, cotangents = arrays[: self._num_arrays], iter(arrays[self._num_arrays :])
        with jax.enable_x64(self.has_x64):  # for the backward functions of the user
            results, pull = jax.vjp(self._call, *inputs)
            # The cotangent of an integer result has the dtype float0, which has no values.
            full = [
                next(cotangents) if _is_inexact(r.dtype) else np.zeros(r.shape, jax.dtypes.float0)
                for r in results
            ]
            return [g for x, g in zip(inputs, pull(full)) if _is_inexact(x.dtype)]


# What can be recorded as one operation and differentiated.
_Differentiable: TypeAlias = _BoundFunction | _VectorJacobianProduct


def _is_inexact(dtype: np.dtype) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.inexact))


def _run(
    call: _Differentiable, tensors: list[XLAShardedTensor]
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """The call's results, differentiable where a tensor requires it; and the call's `out_tree`."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results = _JaxFunction.apply(call, *tensors)
    else:
        results = _record(call, tensors)
    return results, getattr(call, "out_tree", None)


def _record(call: _Differentiable, tensors: Sequence[XLAShardedTensor]) -> tuple[torch.Tensor, ...]:
    specs = tuple(t._handle.spec for t in tensors)
    recorded: tuple[torch.Tensor, ...] = record_own(
        known(("jax", call, specs), lambda: _entry(call, specs)), tensors
    )
    return recorded


def _entry(call: _Differentiable, specs: tuple[Spec, ...]) -> Entry:
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
    run, avals = _core.jaxpr_as_fun(closed), closed.out_avals

    def lowered(context: Any, inputs: Sequence[jax.Array], numbers: Any) -> list[Any]:
        # A constant of the function comes as a number.
        return [
            found if hasattr(found, "shape") else np.asarray(found, aval.dtype)
            for found, aval in zip(run(*inputs), avals)
        ]

    return Entry(
        f"jax::{call.name}",
        lowered,
        outs,
        structure=tuple(range(len(outs))),
    )


class _JaxFunction(torch.autograd.Function):
    """A call, with its vector-Jacobian product as backward, which can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, call: _Differentiable, *tensors: XLAShardedTensor
    ) -> tuple[torch.Tensor, ...]:
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
        product = known(key, lambda: _VectorJacobianProduct(ctx.call, len(tensors)))
        # torch's gradient of a complex tensor is the conjugate of jax's.
        cotangents = [
            g.conj().resolve_conj()
            for g in grads
            if g is not None and (g.is_floating_point() or g.is_complex())
        ]
        results, _ = _run(product, [*tensors, *cotangents])
        gradients = iter(results)
        return (
            None,
            *(
                next(gradients).conj() if t.is_floating_point() or t.is_complex() else None
                for t in tensors
            ),
        )
