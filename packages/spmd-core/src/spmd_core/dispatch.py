"""The one router: every operation on the device comes here, below autograd, and is recorded, derived, decomposed, run on the host, or refused.

Each overload gets a handler the first time that it is met:

- a view becomes a link of a chain over the shared storage (`aliasing`);
- an operation with a lowering becomes a value of the graph (`recording`);
- an in-place or `out=` form is derived from the schema: the functional form computes, the storage is written;
- anything else goes through torch's own composite kernels and decompositions, then to the CPU, counted and warned about once (`fallback`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from spmd_core import inference, metrics, schema
from spmd_core.aliasing import alias, as_strided, in_place_handler, pieces_handler, view_handler
from spmd_core.errors import UnsupportedOpError
from spmd_core.fallback import composite_explicit, decomposition, on_host
from spmd_core.ops import registry
from spmd_core.recording import NO_KWARGS, Handler, from_host, functional_handler
from spmd_core.tensor import XLAShardedTensor, spec_of
from spmd_core.transfer import copy_, item, like_handler, makes_like, resize, store

aten = torch.ops.aten
# By identity: torch keeps one object for an overload, and hashes it in Python, which costs as much as all of the lookup.
_handlers: dict[int, Handler] = {}


def route(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`XLAShardedTensor.__torch_dispatch__`."""
    handler = _handlers.get(id(func))
    if handler is None:
        handler = _handlers[id(func)] = _make_handler(func)
    return handler(args, kwargs or NO_KWARGS)


def _make_handler(func: Any) -> Handler:
    special = _SPECIAL.get(func)
    return _ordinary_handler(func) if special is None else special


def _ordinary_handler(func: Any) -> Handler:
    facts = schema.of(func)
    lowering = registry.find(func)
    if lowering is not None:
        return view_handler(lowering) if facts.is_view else _computed(lowering)
    if facts.written:
        form = schema.functional(func)
        writes_lists = any("[]" in str(a.type) or "List" in str(a.type) for a in func._schema.arguments if a.name in facts.written)
        if form is not None and facts.out_names and not writes_lists:
            return _derived_out(func, form)
        if form is not None and facts.written == facts.names[:1] and not writes_lists:
            computed = registry.find(form)
            return _derived_in_place(func, form) if computed is None else in_place_handler(func, computed)
    if schema.has_kernel(func, "CompositeImplicitAutograd"):
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    if schema.has_kernel(func, "CompositeExplicitAutograd"):
        return composite_explicit(func)
    function = decomposition_table.get(func)
    return on_host(func) if function is None else decomposition(func, function)


def _computed(lowering: registry.Lowering) -> Handler:
    """Records the overload, save for the calls that its lowering declines."""
    record = like_handler(lowering) if makes_like(lowering.overload) else functional_handler(lowering)
    declines = lowering.host_when
    if declines is None:
        return record
    host = on_host(lowering.overload)
    return lambda args, kwargs: host(args, kwargs) if declines(args, kwargs) else record(args, kwargs)


def _derived_in_place(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`x.op_(...)` where the functional form is itself decomposed: compute, then copy into place."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inference.infer(func, args, kwargs, spec_of)
        return store(args[0], form(*args, **kwargs))

    return handler


def _derived_out(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`op(..., out=x)`: compute, check as torch does, resize where torch would, and copy into place."""
    names = schema.of(func).out_names
    lowering = registry.find(form)
    compute = form if lowering is None else _call_of(_computed(lowering))
    # torch leaves out an argument that is None, also where the schema gives it no default (`randperm.generator`).
    required = {a.name: None for a in form._schema.arguments if a.kwarg_only and not a.has_default_value()}
    takes_dtype = any(a.name == "dtype" for a in form._schema.arguments) and not any(a.name == "dtype" for a in func._schema.arguments)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        outs = [kwargs[name] for name in names]
        rest = {**required, **{name: a for name, a in kwargs.items() if name not in names}}
        if takes_dtype:
            rest |= {"dtype": outs[0].dtype, "device": outs[0].device}
        results = compute(*args, **rest)
        results = (results,) if isinstance(results, torch.Tensor) else results
        for out, result in zip(outs, results):
            if not torch.can_cast(result.dtype, out.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type {out.dtype}. Give `out` the dtype {result.dtype}."
                )
            if out.shape != result.shape:
                resize(out, result.shape)
            store(out, result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return handler


def _call_of(handler: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(args, kwargs)


def _set_data(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOpError(
        "set_ and resize_ exchange the memory under a tensor, which a recorded value does not have; got a call on a tensor of shape "
        f"{tuple(args[0].shape)}. Assign tensor.data = other, or make a new tensor."
    )


def _with_positions(func: torch._ops.OpOverload) -> Handler:
    """`index`, `index_put`: a boolean mask selects a number of elements that only the data knows, so its positions are read on the host."""
    lowering = registry.find(func if func is aten.index.Tensor else aten.index_put.default)
    assert lowering is not None
    record = functional_handler(lowering) if lowering.overload is func else in_place_handler(func, lowering)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, indices = args[0], list(args[1])
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        stays = func is not aten.index.Tensor and len(masks) == 1 and sum(i is not None for i in indices) == 1 and args[2].numel() == 1
        if masks and not stays:
            metrics.count("host_reads_of_masks")
            chosen: list[Any] = []
            for i in indices:
                if i is None or i.dtype not in (torch.bool, torch.uint8):
                    chosen.append(i)
                else:
                    chosen.extend(from_host(p) for p in i.cpu().nonzero(as_tuple=True))
            indices = chosen
        indices = [from_host(i) if i is not None and i.__class__ is not XLAShardedTensor else i for i in indices]
        return record((x, indices, *args[2:]), kwargs)

    return handler


def _checked(func: torch._ops.OpOverload, position: int) -> Handler:
    """A number that is written into integers must fit them: as it is an input of the program, only the recording can refuse it."""
    inner: list[Handler] = []

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not inner:
            inner.append(_ordinary_handler(func))
        dtype = kwargs.get("dtype") or args[0].dtype
        if not (dtype.is_floating_point or dtype.is_complex) and len(args) > position:
            torch.empty((), dtype=dtype, device="cpu").fill_(args[position])  # raises what eager torch raises
        return inner[0](args, kwargs)

    return handler


def _native_batch_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm` moves the running statistics, which its schema does not say: the functional form, then two writes."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training:
        return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    out, save_mean, save_var, new_mean, new_var = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, training, momentum, eps)
    store(mean, new_mean)
    store(var, new_var)
    return out, save_mean, save_var


_SPECIAL: dict[Any, Handler] = {
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.lift_fresh.default: alias,
    aten.copy_.default: copy_,
    aten.as_strided.default: as_strided,
    aten.split.Tensor: pieces_handler(aten.split.Tensor),
    aten.split_with_sizes.default: pieces_handler(aten.split_with_sizes.default),
    aten.unbind.int: pieces_handler(aten.unbind.int),
    aten._local_scalar_dense.default: item,
    aten.index.Tensor: _with_positions(aten.index.Tensor),
    aten.index_put_.default: _with_positions(aten.index_put_.default),
    aten.index_put.default: _with_positions(aten.index_put.default),
    aten._index_put_impl_.default: lambda args, kwargs: route(None, aten.index_put_.default, (), args[:4]),
    aten.native_batch_norm.default: _native_batch_norm,
    aten.fill_.Scalar: _checked(aten.fill_.Scalar, 1),
    aten.fill.Scalar: _checked(aten.fill.Scalar, 1),
    aten.full_like.default: _checked(aten.full_like.default, 1),
    aten.masked_fill_.Scalar: _checked(aten.masked_fill_.Scalar, 2),
    aten.masked_fill.Scalar: _checked(aten.masked_fill.Scalar, 2),
    aten.resize_.default: _set_data,
    **{getattr(aten.set_, name): _set_data for name in aten.set_.overloads()},
}
