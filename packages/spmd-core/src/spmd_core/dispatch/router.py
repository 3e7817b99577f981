"""The router: finds a handler for each operation on the device, below autograd, and calls it.

An overload gets its handler at its first call:

- a view becomes a link of a chain over the shared storage (`recording.views`);
- an operation with a lowering becomes a value of the graph (`recording.calls`);
- an in-place or `out=` form is derived from the schema: the functional form computes the result,
  which is written to the storage;
- anything else goes through torch's own composite kernels and decompositions, then to the CPU,
  counted and warned about once (`dispatch.fallback`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from spmd_core import releases, source_lines
from spmd_core.config import config
from spmd_core.dispatch import (
    data_dependent,
    layouts,
    linalg_checks,
    process_groups,
    selections,
    set_resize,
    special,
)
from spmd_core.dispatch.fallback import (
    composite_explicit,
    count_writes,
    decomposition,
    on_host,
    written_lists,
)
from spmd_core.dispatch.transfer import copy_, item, like_handler, makes_like, store
from spmd_core.errors import DeviceMismatchError
from spmd_core.ops import registry
from spmd_core.recording import calls, cpu_kernels, inference, schema
from spmd_core.recording.calls import NO_KWARGS, Handler, functional_handler
from spmd_core.recording.in_place import in_place_handler, several_written_handler
from spmd_core.recording.stand_ins import leaves_of
from spmd_core.recording.views import alias, as_strided, pieces_handler, view_handler
from spmd_core.runtime import devices
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, replace_handle, spec_of

aten = torch.ops.aten
# By identity: an overload is one object, and torch hashes it in Python, which costs as much as the
# whole lookup.
# Guarded by: the GIL (`setdefault`): entries are those of a handler, and programs are compared by
# them, so that with two handlers each thread compiles its own. Cleared by: router.forget().
_handlers: dict[int, Handler] = {}
# Functions by which packages built on this one wrap a handler.
# Guarded by: imports. Cleared by: never.
_wrappers: dict[torch._ops.OpOverload, Callable[[Handler], Handler]] = {}


class Route(StrEnum):
    """How the calls of an overload are executed."""

    LOWERED = "lowered"
    VIEW = "a view of shared storage"
    SPECIAL = "its own handler"
    IN_PLACE = "in place, derived from the functional form"
    OUT = "out=, derived from the functional form"
    REGISTERED = "the kernel that was registered for the device"
    COMPOSED = "torch's composition"
    DECOMPOSED = "torch's decomposition"
    HOST = "on the host"
    REFUSED = "refused, as its result is not dense"


def route(
    cls: type[XLAShardedTensor] | None,
    func: torch._ops.OpOverload,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`XLAShardedTensor.__torch_dispatch__`: calls the handler of the overload."""
    handler = _handlers.get(id(func))
    if handler is None:
        handler = _handlers.setdefault(id(func), _make_handler(func))
    if config.record_source_lines:
        source_lines.note_forward(args, kwargs or NO_KWARGS)
    return handler(args, kwargs or NO_KWARGS)


def forget() -> None:
    """Drops all handlers and inferred results, as in a new process. Programs stay compiled.

    `recording.calls.entries` then holds only what is recorded afterwards.
    """
    _handlers.clear()
    calls.forget()


def wrap(func: torch._ops.OpOverload, wrapper: Callable[[Handler], Handler]) -> None:
    """Sends calls of an overload to `wrapper(handler)`, for packages built on this one."""
    _wrappers[func] = wrapper
    _handlers.pop(id(func), None)


def _make_handler(func: torch._ops.OpOverload) -> Handler:
    handler = _SPECIAL.get(func) or _ordinary_handler(func)
    if schema.of(func).out_names:
        handler = _on_one_device(func, handler)
    if selections.on_first is None and selections.takes_sizes(func):
        handler = selections.with_sizes(func, handler)
    wrapper = _wrappers.get(func)
    return handler if wrapper is None else wrapper(handler)


def _on_one_device(func: torch._ops.OpOverload, handler: Handler) -> Handler:
    """The handler of an `out=` form, for calls whose tensors are all on the device.

    As on other devices, a result is not moved to where `out` is; an input without dims may be on
    the host.
    """
    out_names = schema.of(func).out_names

    def checked(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for name, given in (*((None, a) for a in args), *kwargs.items()):
            for t in leaves_of(given):
                if not isinstance(t, torch.Tensor) or t.device.type == "xla":
                    continue
                if name in out_names or t.dim() != 0:
                    is_out = name in out_names
                    raise DeviceMismatchError(
                        "all tensors of an operation must be on one device, also those that it "
                        f"writes; {func} got {'out=' if is_out else 'an input'} on {t.device} "
                        "beside tensors on xla:0. "
                        + (
                            "Leave out= out, and move the result with .to(device)."
                            if is_out
                            else "Move it with .to('xla')."
                        )
                    )
        return handler(args, kwargs)

    return checked


def route_of(func: torch._ops.OpOverload) -> Route:
    """The route of an overload's calls, except those that a lowering or decomposition declines."""
    if func in layouts.HANDLERS:
        return Route.REFUSED
    return Route.SPECIAL if func in _SPECIAL else _choose_route(func)[0]


def _ordinary_handler(func: torch._ops.OpOverload) -> Handler:
    return _choose_route(func)[1]()


def _choose_route(func: torch._ops.OpOverload) -> tuple[Route, Callable[[], Handler]]:
    """The route of an overload without a special handler, and a function that makes its handler."""
    facts = schema.of(func)
    lowering = registry.find_lowering(func)
    if lowering is not None:
        return (
            (Route.VIEW, partial(view_handler, lowering))
            if facts.is_view
            else (Route.LOWERED, partial(_computed, lowering))
        )
    if func.namespace != "aten" and schema.has_kernel(func, "XLA"):
        return Route.REGISTERED, partial(_registered, func)
    if facts.written:
        form = schema.functional(func)
        if form is not None and torch.Tag.inplace_view in func.tags:
            return Route.IN_PLACE, partial(_in_place_view, form)
        writes_lists = bool(written_lists(func))
        if form is not None and facts.out_names:
            return Route.OUT, partial(_derived_out, func, form)
        several = writes_lists or (len(facts.written) > 1 and not facts.out_names)
        computed = None if form is None else registry.find_lowering(form)
        if several and computed is not None:
            return Route.IN_PLACE, partial(several_written_handler, func, computed)
        if form is not None and facts.written == facts.names[:1] and not writes_lists:
            return Route.IN_PLACE, partial(
                _derived_in_place, func, form
            ) if computed is None else partial(in_place_handler, func, computed)
    if schema.has_kernel(func, "CompositeImplicitAutograd"):
        return Route.COMPOSED, lambda: lambda args, kwargs: func.decompose(*args, **kwargs)
    if schema.has_kernel(func, "CompositeExplicitAutograd"):
        return Route.COMPOSED, partial(composite_explicit, func)
    function = decomposition_table.get(func)
    return (
        (Route.HOST, partial(on_host, func))
        if function is None
        else (Route.DECOMPOSED, partial(decomposition, func, function))
    )


def _computed(lowering: registry.Lowering) -> Handler:
    """Records the overload; runs calls that its lowering declines on the host."""
    record = (
        like_handler(lowering) if makes_like(lowering.overload) else functional_handler(lowering)
    )
    declines = lowering.host_when
    if declines is None:
        return record
    host = on_host(lowering.overload, "has no lowering for these arguments on this platform")
    return lambda args, kwargs: (
        host(args, kwargs) if declines(args, kwargs, devices.platform()) else record(args, kwargs)
    )


def _registered(func: torch._ops.OpOverload) -> Handler:
    """Calls the kernel of a user's operation for device `xla`, with tensors on the device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    return lambda args, kwargs: func.redispatch(keys, *args, **kwargs)


def _in_place_view(form: torch._ops.OpOverload) -> Handler:
    """`t_`, `squeeze_` and similar overloads, which make a tensor another view of its storage."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        replace_handle(args[0], form(*args, **kwargs)._handle)
        return args[0]

    return handler


def _derived_in_place(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`x.op_(...)` whose functional form has no lowering: computes, then copies into place."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inference.infer(func, args, kwargs, spec_of)
        return store(args[0], form(*args, **kwargs))

    return handler


# Reductions that first convert their input to the dtype of `out`, as if it were their `dtype`.
_COMPUTE_IN_OUT_DTYPE = ("sum", "nansum", "prod", "mean", "cumsum", "cumprod")


def _derived_out(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`op(..., out=x)`: computes, checks and resizes as torch does, then copies into place."""
    facts = schema.of(func)
    names = facts.out_names
    computes_in_out_dtype = form._schema.name.removeprefix("aten::") in _COMPUTE_IN_OUT_DTYPE
    # A functional form with a handler of its own, such as `linalg_inv_ex`, is called through the
    # router.
    lowering = None if form in _SPECIAL else registry.find_lowering(form)
    compute = form if lowering is None else _call_of(_computed(lowering))
    # torch omits arguments that are None, even without a default in the schema
    # (`randperm.generator`).
    required = {
        a.name: None for a in form._schema.arguments if a.kwarg_only and not a.has_default_value()
    }
    writes_lists = bool(written_lists(func))
    takes_dtype = any(a.name == "dtype" for a in form._schema.arguments) and not any(
        a.name == "dtype" for a in func._schema.arguments
    )

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = [kwargs[name] for name in names]
        outs = [t for out in given for t in (out if isinstance(out, (list, tuple)) else [out])]
        is_accepted = cpu_kernels.refuse(func, args, kwargs)
        # For torch's other errors, its warning if `out` is resized, and the strides that it then
        # gets. Overloads without a meta kernel are checked in their parts.
        layouts: list[Any] = [None] * len(outs)
        with suppress(NotImplementedError):
            found = list(leaves_of(inference.infer(func, args, kwargs, spec_of)))
            layouts = found if len(found) == len(outs) else layouts
        rest = {**required, **{name: a for name, a in kwargs.items() if name not in names}}
        if computes_in_out_dtype and facts.by_name(args, kwargs).get("dtype") is None:
            rest["dtype"] = outs[0].dtype
        if takes_dtype:
            rest |= {"dtype": outs[0].dtype, "device": outs[0].device}
        results = compute(*args, **rest)
        results = (results,) if isinstance(results, torch.Tensor) else results
        if len(results) != len(outs):
            raise RuntimeError(
                f"{func} writes {len(results)} tensors; got {len(outs)} in `out`. "
                "Give one tensor for each result."
            )
        for out, result, layout in zip(outs, results, layouts):
            if not is_accepted and not torch.can_cast(result.dtype, out.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast "
                    f"to the desired output type {out.dtype}. Give `out` the dtype {result.dtype}."
                )
            if out.shape != result.shape:
                is_known = layout is not None and layout.shape == result.shape
                set_resize.resize_out(out, layout if is_known else result)
            store(out, result)
        if writes_lists:  # autograd counts the write of a tensor, not those of a list
            count_writes(outs)
        if not func._schema.returns:
            return None
        return given[0] if len(given) == 1 else tuple(given)

    return handler


def out_handler(func: torch._ops.OpOverload) -> Handler:
    """A handler for an `out=` overload that torch would compose."""
    form = schema.functional(func)
    assert form is not None, f"{func} has no functional form"
    return _on_one_device(func, _derived_out(func, form))


def _call_of(handler: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(args, kwargs)


def _check_number_fits(func: torch._ops.OpOverload, position: int) -> Handler:
    """Raises torch's error for a number that does not fit the dtype into which it is written.

    The number is an input of the program, so it can only be refused when it is recorded.
    """
    inner: list[Handler] = []

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not inner:
            inner.append(data_dependent.HANDLERS.get(func) or _ordinary_handler(func))
        dtype = kwargs.get("dtype") or args[0].dtype
        if len(args) > position and cpu_kernels.may_not_fit(args[position], dtype):
            try:
                torch.zeros((), dtype=dtype).fill_(args[position])
            except RuntimeError:
                cpu_kernels.refuse(func, args, kwargs)  # torch reports another mistake first
                raise
        return inner[0](args, kwargs)

    return handler


# Drops the handlers made so far, which do not expect SymInts; no operation gets one before.
selections.on_first = _handlers.clear
_HANDLERS: dict[str, Handler] = {
    "aten.detach.default": alias,
    "aten.alias.default": alias,
    "aten.lift_fresh.default": alias,
    "aten.copy_.default": copy_,
    "aten.as_strided.default": as_strided,
    "aten._local_scalar_dense.default": item,
    "aten._index_put_impl_.default": lambda args, kwargs: route(
        None, aten.index_put_.default, (), args[:4]
    ),
    # TransformerEncoder asks whether it may use nested tensors, which this device does not have.
    # The constant answer avoids a read of the mask.
    "aten._nested_tensor_from_mask_left_aligned.default": lambda args, kwargs: False,
    "aten.resize_as_.default": lambda args, kwargs: set_resize.resize_(
        (args[0], args[1].shape), kwargs
    ),
    "aten.resize_.default": set_resize.resize_,
    "aten.is_set_to.default": set_resize.is_set_to,
    **{f"aten.set_.{name}": set_resize.set_to_storage for name in aten.set_.overloads()},
    "aten.set_.default": set_resize.set_to_nothing,
    "aten.set_.source_Tensor": set_resize.set_to_tensor,
}
_MADE: dict[str, Callable[[torch._ops.OpOverload], Handler]] = {
    "aten.split.Tensor": pieces_handler,
    "aten.split_with_sizes.default": pieces_handler,
    "aten.unbind.int": pieces_handler,
    "aten.unsafe_split.Tensor": pieces_handler,
    "aten.unsafe_split_with_sizes.default": pieces_handler,
    "aten.fill_.Scalar": partial(_check_number_fits, position=1),
    "aten.fill.Scalar": partial(_check_number_fits, position=1),
    "aten.full_like.default": partial(_check_number_fits, position=1),
    "aten.masked_fill_.Scalar": partial(_check_number_fits, position=2),
    "aten.masked_fill.Scalar": partial(_check_number_fits, position=2),
    "aten.new_full.default": partial(_check_number_fits, position=2),
    "aten.index_fill_.int_Scalar": partial(_check_number_fits, position=3),
    "aten.index_fill.int_Scalar": partial(_check_number_fits, position=3),
    "aten.threshold.default": partial(_check_number_fits, position=2),
    "aten.threshold_.default": partial(_check_number_fits, position=2),
}
_SPECIAL: dict[torch._ops.OpOverload, Handler] = {
    **data_dependent.HANDLERS,
    **linalg_checks.HANDLERS,
    **special.HANDLERS,
    **process_groups.HANDLERS,
    **layouts.HANDLERS,
    **layouts.PARTIAL_HANDLERS,
    **releases.overloads(_HANDLERS),
    **{func: make(func) for func, make in releases.overloads(_MADE).items()},
}
