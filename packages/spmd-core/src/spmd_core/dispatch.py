"""The one router: every operation on the device comes here, below autograd, and is recorded, decomposed, run on the host, or refused.

Each overload gets a handler the first time that it is met:

- a view becomes a link of a chain over the shared storage;
- an operation with a lowering becomes a value of the graph, its inferred result memoised on (overload, specs, static arguments);
- an in-place, `out=` or foreign-named form is derived from the schema: the functional form computes, the storage is written;
- anything else goes through torch's own composite kernels and decompositions, then to the CPU, counted and warned about once.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from torch._decomp import decomposition_table

from spmd_core import dtypes, execution, inference, metrics, random_stream, schema
from spmd_core.config import config
from spmd_core.errors import DeviceMismatchError, HostFallbackError, UnsupportedOpError
from spmd_core.graph import Entry, Part, Spec, Value
from spmd_core.ops import load_all, registry
from spmd_core.storage import Handle, Storage, View, lock, read
from spmd_core.tensor import XLAShardedTensor, spec_of, wrap

aten = torch.ops.aten
Handler = Callable[[Sequence[Any], dict[str, Any]], Any]

# By identity: torch keeps one object for an overload, and hashes it in Python, which costs as much as all of the lookup.
_handlers: dict[int, Handler] = {}
_entries: dict[Any, Entry] = {}
_view_writes: dict[Entry, Entry] = {}
_view_calls: dict[Entry, tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]] = {}
_NUMBERS = frozenset({float, int, bool, complex})
_NO_KWARGS: dict[str, Any] = {}
_default_dtype = torch.get_default_dtype
# Same shape in, same shape out, and the result stands for its source: it is sharded like it.
_INHERITS_SHARDING = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "clone", "_to_copy"})


def route(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`XLAShardedTensor.__torch_dispatch__`."""
    handler = _handlers.get(id(func))
    if handler is None:
        handler = _handlers[id(func)] = _make_handler(func)
    return handler(args, kwargs or _NO_KWARGS)


# --- Recording ------------------------------------------------------------------------------------------------------------------------


class _Call:
    """How the calls of one overload are looked up: which arguments are numbers, and how a new entry is made."""

    __slots__ = ("func", "infer", "numbers", "static_when_int")

    def __init__(self, func: Any, static: frozenset[str], make_entry: Callable[..., Entry]) -> None:
        facts = schema.of(func, static)
        self.func, self.infer = func, make_entry
        # Both by position and by name, as an argument may come either way.
        self.numbers = frozenset(facts.number_positions) | facts.number_names
        self.static_when_int = frozenset(facts.names.index(n) for n in facts.static_when_int) | facts.static_when_int


def _look_up(call: _Call, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Entry, list[Value], list[Any]]:
    """The call's entry, its input values and its numbers. The hot path: a few bytecodes per argument, and one lookup."""
    key: list[Any] = [call, _default_dtype()]
    inputs: list[Value] = []
    numbers: list[Any] = []
    for a in args:
        kind = a.__class__
        if kind is XLAShardedTensor:
            handle = a._handle
            key.append(handle.spec)
            inputs.append(handle.value if handle.__class__ is Storage else handle.current())
        elif kind in _NUMBERS:
            position = len(key) - 2
            if position in call.numbers and not (kind is int and position in call.static_when_int):
                key.append(kind)
                numbers.append(a)
            else:
                key.append(a)
        elif kind is list or kind is tuple:
            key.append(tuple(a) if a and a[0].__class__ is int else _look_up_list(a, inputs))
        elif isinstance(a, torch.Tensor):
            key.append(_host_scalar(call, a, inputs))
        else:
            key.append(a)
    if kwargs:
        _look_up_keywords(call, kwargs, key, inputs, numbers)
    whole = tuple(key)
    entry = _entries.get(whole)
    if entry is None:
        entry = call.infer(args, kwargs, tuple(n.__class__ for n in numbers))
        _remember(whole, entry)
    return entry, inputs, numbers


def _look_up_keywords(call: _Call, kwargs: dict[str, Any], key: list[Any], inputs: list[Value], numbers: list[Any]) -> None:
    for name, a in kwargs.items():
        kind = a.__class__
        if kind is XLAShardedTensor:
            key.append((name, a._handle.spec))
            inputs.append(read(a._handle))
        elif kind in _NUMBERS and name in call.numbers and not (kind is int and name in call.static_when_int):
            key.append((name, kind))
            numbers.append(a)
        elif kind is list or kind is tuple:
            key.append((name, _look_up_list(a, inputs)))
        elif isinstance(a, torch.Tensor):
            key.append((name, _host_scalar(call, a, inputs)))
        elif kind is not torch.Generator:
            key.append((name, a))


def _remember(key: Any, entry: Entry) -> None:
    if len(_entries) >= config.max_op_entries:
        oldest = list(_entries)[: config.max_op_entries // 4]
        for old in oldest:
            del _entries[old]
        metrics.count("op_entries_dropped", len(oldest))
    _entries[key] = entry


def _look_up_list(items: Sequence[Any], inputs: list[Value]) -> Any:
    key: list[Any] = ["["]
    for a in items:
        if a.__class__ is XLAShardedTensor:
            key.append(a._handle.spec)
            inputs.append(read(a._handle))
        elif isinstance(a, torch.Tensor):
            key.append(Spec.from_tensor(a))
            inputs.append(_host_leaf(a).value)
        else:
            key.append((a.__class__, a))
    return tuple(key)


def _host_scalar(call: _Call, a: torch.Tensor, inputs: list[Value]) -> Spec:
    """A CPU tensor among the arguments: a 0-dim one goes up as it does for any device, others are the user's mistake."""
    if a.dim() != 0 or a.device.type != "cpu":
        raise DeviceMismatchError(
            f"all tensors of an operation must be on one device; {call.func} got a {a.dtype} tensor of shape {tuple(a.shape)} on {a.device} "
            "beside tensors on xla:0. Move it with .to('xla')."
        )
    inputs.append(_host_leaf(a).value)
    return Spec.from_tensor(a)


def _host_leaf(tensor: torch.Tensor, spec: Spec | None = None) -> Storage:
    """A storage over a private copy of a CPU tensor."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format)
    return Storage.of_leaf(spec or Spec.contiguous(tuple(data.shape), data.dtype), data, execution.host_placement())


def from_host(tensor: torch.Tensor) -> XLAShardedTensor:
    """A CPU tensor's values as a tensor on the device; they go up when the first program needs them."""
    dtypes.to_jax(tensor.dtype)
    return wrap(_host_leaf(tensor))


def to_host(tensor: XLAShardedTensor) -> torch.Tensor:
    """The values on the CPU, in a new tensor. Cuts, and waits for the device."""
    handle = tensor._handle
    if handle.__class__ is Storage:
        return execution.to_host(handle)
    base, spec = handle.storage.spec, handle.spec
    if base.num_bytes <= 1 << 24 and base is Spec.contiguous(base.shape, base.dtype) and spec.dtype is base.dtype:
        # A small base is read whole: a program for each different view of it would cost a compile.
        return execution.to_host(handle.storage).as_strided(spec.shape, spec.strides, spec.offset).clone(memory_format=torch.contiguous_format)
    with lock:
        execution.materialize(handle.storage)
        copy = Storage(handle.current(), Spec.contiguous(spec.shape, spec.dtype))
        value = handle.current()
        handle.value = Value(value.entry, value.inputs, ())  # the copy owns its value alone
    return execution.to_host(copy)


def write(handle: Handle, value: Value) -> None:
    """Makes `value` the handle's value, through the chain where it is a view."""
    if handle.__class__ is Storage:
        handle.write(value)
        return
    spec = handle.spec
    if any(step == 0 and n > 1 for step, n in zip(spec.strides, spec.shape)):
        raise RuntimeError(
            f"a write needs every element at its own place; this view of shape {spec.shape} is expanded, so several elements share one "
            "memory location. clone() the tensor before writing to it."
        )
    bases = handle.intermediate_values()
    written = value
    for entry, base in zip(reversed(handle.chain), reversed(bases)):
        written = Value(_view_write_entry(entry, base.spec), (base, written), ())
    handle.storage.write(written)
    handle.value, handle.version = value, handle.storage.version


def _structured(entry: Entry, node: Value) -> Any:
    results = [None if i is None else wrap(Storage(Part(node, i), entry.outs[i])) for i in entry.structure]
    return results if entry.as_list else tuple(results)


def _functional_handler(lowering: registry.Lowering) -> Handler:
    func = lowering.overload
    call = _Call(func, lowering.static, lambda args, kwargs, kinds: _entry(lowering, inference.infer(func, args, kwargs, spec_of), args, kwargs, kinds))
    inherits = func._schema.name.split("::")[1] in _INHERITS_SHARDING

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            entry, inputs, numbers = _look_up(call, args, kwargs)
            node = Value(entry, inputs, numbers)
            if entry.structure is not None:
                return _structured(entry, node)
            return wrap(Storage(node, entry.spec))

    def record_random(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            entry, inputs, numbers = _look_up(call, args, kwargs)
            numbers.append(random_stream.draw(kwargs.get("generator")))
            node = Value(entry, inputs, numbers)
            result = _structured(entry, node) if entry.structure is not None else wrap(Storage(node, entry.spec))
        if inherits:
            _inherit(result, args[0])
        return result

    def record_like(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type != "xla":
            if func is aten._to_copy.default:
                return _copy_to(args[0], device, kwargs)
            return func(inference.meta_like(spec_of(args[0])), *args[1:], **kwargs)
        result = record(args, kwargs)
        _inherit(result, args[0])
        return result

    if lowering.random:
        return record_random
    return record_like if inherits or func._schema.name.split("::")[1].startswith("new_") else record


def _inherit(result: XLAShardedTensor, source: Any) -> None:
    if source.__class__ is XLAShardedTensor:
        sharding = source._handle.sharding
        if sharding is not None and result._handle.spec.shape == source._handle.spec.shape:
            result._handle.sharding = sharding


def _copy_to(source: XLAShardedTensor, device: torch.device, kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor.to(another device)`: through the CPU."""
    host = to_host(source)
    return host.to(device=device, dtype=kwargs.get("dtype") or host.dtype)


def _entry(
    lowering: registry.Lowering, result: Any, args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...], into: Spec | None = None
) -> Entry:
    """A new entry: the lowering with every static argument bound; with `into`, its result is converted to that spec's dtype."""
    outs, structure, as_list = inference.flatten(result)
    return Entry(
        lowering.overload.name(),
        _kernel(lowering, args, kwargs, outs, into),
        outs if into is None else (into,),
        structure=None if into is not None else structure,
        as_list=as_list,
        number_kinds=(*kinds, int) if lowering.random else kinds,
        random=lowering.random,
    )


_TENSOR, _NUMBER = object(), object()


def _bind(facts: schema.Schema, static: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with a placeholder for each tensor and each number."""

    def place(name: str, a: Any, *, in_list: bool = False) -> Any:
        if isinstance(a, torch.Tensor):
            return _TENSOR
        if isinstance(a, (list, tuple)):
            return [place(name, x, in_list=True) for x in a]
        is_number = not in_list and a.__class__ in _NUMBERS and name in facts.number_names and name not in static
        return _NUMBER if is_number and not (a.__class__ is int and name in facts.static_when_int) else a

    plan = [place(name, a) for name, a in zip(facts.names, args)]
    return plan, {name: place(name, a) for name, a in inference.without_placement(kwargs).items()}


def _fill(plan: Any, inputs: Any, numbers: Any) -> Any:
    if plan is _TENSOR:
        return next(inputs)
    if plan is _NUMBER:
        return next(numbers)
    return [_fill(x, inputs, numbers) for x in plan] if isinstance(plan, list) else plan


def _kernel(lowering: registry.Lowering, args: Sequence[Any], kwargs: dict[str, Any], outs: tuple[Spec, ...], into: Spec | None) -> Callable[..., list[Any]]:
    plan, keywords = _bind(schema.of(lowering.overload, lowering.static), lowering.static, args, kwargs)
    contexts = tuple(registry.Out(s.shape, s.dtype) for s in outs)

    def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        arrays, scalars = iter(inputs), iter(numbers)
        context.outs = contexts
        filled = [_fill(p, arrays, scalars) for p in plan]
        result = lowering.function(context, *filled, **{name: _fill(p, arrays, scalars) for name, p in keywords.items()})
        results = [x for x in result if x is not None] if isinstance(result, (tuple, list)) else [result]
        return results if into is None else [jnp.broadcast_to(results[0].astype(dtypes.to_jax(into.dtype)), into.shape)]

    return kernel


# --- Views ----------------------------------------------------------------------------------------------------------------------------


def _view_handler(lowering: registry.Lowering) -> Handler:
    func = lowering.overload

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        result = inference.infer(func, args, kwargs, spec_of)
        entry = _entry(lowering, result, args, kwargs, kinds)
        base = spec_of(args[0])
        spec = entry.outs[0]
        entry.spec = Spec.of(spec.shape, spec.strides, spec.dtype, base.offset + spec.offset)
        _view_calls[entry] = (func, tuple(args[1:]), inference.without_placement(kwargs))
        return entry

    # A view's numbers are indices: all of them are static.
    call = _Call(func, frozenset(schema.of(func).names), make)

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            handle = args[0]._handle
            entry, inputs, _ = _look_up(call, args, kwargs)
            value = Value(entry, inputs, ())
            if handle.__class__ is Storage:
                return wrap(View(handle, (entry,), entry.spec, value))
            return wrap(View(handle.storage, (*handle.chain, entry), entry.spec, value))

    return record


def _view_write_entry(entry: Entry, base: Spec) -> Entry:
    """The operation that puts a written view back into its base."""
    found = _view_writes.get(entry)
    if found is None:
        func, args, kwargs = _view_calls[entry]
        place = registry.find_view_write(func) or _write_by_position(func)

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [place(inputs[0], inputs[1], *args, **kwargs)]

        found = _view_writes[entry] = Entry(f"write.{entry.name}", kernel, (base,))
    return found


def _write_by_position(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """A write for any view that only selects and reorders: view the positions, and set those."""
    lowering = registry.find(func)

    def place(base: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
        positions = jnp.arange(base.size).reshape(base.shape)
        context = registry.Context((registry.Out(view.shape, torch.int64),), "cpu")
        chosen = lowering.function(context, positions, *args, **kwargs)
        return base.reshape(-1).at[chosen.reshape(-1)].set(view.reshape(-1)).reshape(base.shape)

    return place


def _alias(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return wrap(args[0]._handle)


def _pieces(func: Any) -> Handler:
    """`split`, `split_with_sizes`, `unbind`: each piece is a view of its own."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        x = args[0]
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        dim = given.get("dim", 0)
        dim = dim % x.dim() if x.dim() else dim
        metas = inference.infer(func, args, kwargs, spec_of)
        if func is aten.unbind.int:
            return [route(None, aten.select.int, (), (x, dim, i)) for i in range(len(metas))]
        pieces, start = [], 0
        for meta in metas:
            pieces.append(route(None, aten.slice.Tensor, (), (x, dim, start, start + meta.shape[dim])))
            start += meta.shape[dim]
        return pieces

    return handler


def _as_strided(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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
    entry = _entries.get(key)
    if entry is None:
        spec = Spec.of(size, strides, base.dtype, offset)
        function = registry.find(aten.as_strided.default).function
        back = registry.find_view_write(aten.as_strided.default)
        shape, inverse = dense.shape, tuple(order.index(d) for d in range(len(order)))

        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [function(context, inputs[0].transpose(order), size, strides, offset)]

        def write_back(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
            return [back(inputs[0].transpose(order), inputs[1], size, strides, offset).reshape(shape).transpose(inverse)]

        entry = _entries[key] = Entry("aten::as_strided", kernel, (spec,))
        _view_writes[entry] = Entry("write.aten::as_strided", write_back, (base,))
    with lock:
        return wrap(View(storage, (entry,), entry.spec, Value(entry, (storage.value,), ())))


# --- Writes ---------------------------------------------------------------------------------------------------------------------------


def _in_place_handler(func: torch._ops.OpOverload, lowering: registry.Lowering) -> Handler:
    """`x.op_(...)` where the functional form has a lowering: one recorded operation, then a write."""

    def make(args: Sequence[Any], kwargs: dict[str, Any], kinds: tuple[type, ...]) -> Entry:
        inference.infer(func, args, kwargs, spec_of)  # raises what torch raises for a result that does not fit
        result = inference.infer(lowering.overload, args, kwargs, spec_of)
        into = spec_of(args[0])
        return _entry(lowering, result, args, kwargs, kinds, into=Spec.contiguous(into.shape, into.dtype))

    call = _Call(func, lowering.static, make)
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
            raise DeviceMismatchError(f"{func} cannot write a tensor on {target.device} from tensors on xla:0. Move it with .to('xla'), or the others with .cpu().")
        with lock:
            entry, inputs, numbers = _look_up(call, args, kwargs)
            if random:
                numbers.append(random_stream.draw(kwargs.get("generator")))
            write(target._handle, Value(entry, inputs, numbers))
        return target

    return record


def _derived_in_place(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`x.op_(...)` where the functional form is itself decomposed: compute, then copy into place."""

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inference.infer(func, args, kwargs, spec_of)
        return _store(args[0], form(*args, **kwargs))

    return handler


def _derived_out(func: torch._ops.OpOverload, form: torch._ops.OpOverload) -> Handler:
    """`op(..., out=x)`: compute, check as torch does, resize where torch would, and copy into place."""
    names = schema.of(func).out_names
    lowering = registry.find(form)
    compute = form if lowering is None else _call_of(_functional_handler(lowering))
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
                raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}. Give `out` the dtype {result.dtype}.")
            if out.shape != result.shape:
                _resize(out, result.shape)
            _store(out, result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return handler


def _call_of(handler: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handler(args, kwargs)


def _store(target: Any, result: torch.Tensor) -> Any:
    return _copy_((target, result), _NO_KWARGS)


def _resize(target: XLAShardedTensor, shape: Sequence[int]) -> None:
    """What torch does to an `out=` tensor of another shape: an empty one takes the shape, others are refused."""
    if target.numel() != 0 or target._handle.__class__ is not Storage:
        raise RuntimeError(
            f"an `out` tensor must be empty or have the result's shape {tuple(shape)}; got {tuple(target.shape)}. Pass torch.empty(0, device='xla')."
        )
    target.data = wrap(_empty(tuple(shape), target.dtype))


def _copy_(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`dst.copy_(src)` between any two devices."""
    target, source = args[0], args[1]
    if target.__class__ is not XLAShardedTensor:
        return target.copy_(to_host(source))
    handle = target._handle
    if source.__class__ is not XLAShardedTensor:
        inference.infer(aten.copy_.default, (target, source), {}, spec_of)
        host = source.detach().to(device="cpu", dtype=target.dtype)
        if handle.__class__ is Storage and host.shape == target.shape:
            dtypes.to_jax(host.dtype)
            data = host.clone(memory_format=torch.contiguous_format) if host.data_ptr() == source.data_ptr() else host.contiguous()
            with lock:
                handle.write(Value.leaf(handle.spec, data, execution.host_placement(handle.sharding), None))
            return target
        source = from_host(host)
    return _copy_on_device((target, source), _NO_KWARGS)


def _set_data(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOpError(
        "set_ and resize_ exchange the memory under a tensor, which a recorded value does not have; got a call on a tensor of shape "
        f"{tuple(args[0].shape)}. Assign tensor.data = other, or make a new tensor."
    )


# --- Factories, reads -----------------------------------------------------------------------------------------------------------------


def _empty(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Storage:
    """A storage of zeros: memory on the device is never uninitialised."""
    dtypes.to_jax(dtype)
    key = ("empty", shape, dtype, strides)
    entry = _entries.get(key)
    if entry is None:
        spec = Spec.contiguous(shape, dtype) if strides is None else Spec.of(shape, strides, dtype)
        entry = _entries[key] = Entry("aten::empty", lambda context, inputs, numbers: [jnp.zeros(shape, dtypes.to_jax(dtype))], (spec,))
    with lock:
        return Storage(Value(entry, (), ()), entry.spec)


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> XLAShardedTensor:
    """`aten::empty` on device `xla`, from which torch builds its other factories."""
    shape = tuple(size)
    strides = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = tuple(torch.empty(shape, device="meta", memory_format=memory_format).stride())
    return wrap(_empty(shape, dtype or torch.get_default_dtype(), strides))


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> XLAShardedTensor:
    """`aten::empty_strided` on device `xla`."""
    return wrap(_empty(tuple(size), dtype or torch.get_default_dtype(), tuple(stride)))


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::_copy_from` on device `xla`: how C++ copies where it goes round Python's dispatch, as `torch.tensor(..., device="xla")` does."""
    return _copy_((target, source), _NO_KWARGS)


def _item(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return to_host(args[0]).item()


# --- What has no lowering -------------------------------------------------------------------------------------------------------------


def _composite_explicit(func: torch._ops.OpOverload) -> Handler:
    """torch's own C++ composition, for instance foreach forms: its pieces come back here."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return func.redispatch(keys, *args, **kwargs)

    return handler


def _decomposition(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Handler:
    fall_back = _host(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        return fall_back(args, kwargs) if result is NotImplemented else result

    return handler


def _host(func: torch._ops.OpOverload) -> Handler:
    """On the CPU: read the arguments, run, and take the results back; counted, and warned about once."""
    facts = schema.of(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        if config.strict:
            raise HostFallbackError(
                f"strict mode allows no operation on the host; {name} has neither a lowering nor a decomposition. Rewrite it with other operations, or leave strict mode."
            )
        if metrics.count_fallback(name):
            warnings.warn(
                f"{name} has no lowering for device 'xla' and runs on the host: it cuts the program and copies its arguments. Counted in metrics.host_fallbacks().",
                stacklevel=3,
            )
        moved: dict[int, torch.Tensor] = {}

        def down(t: torch.Tensor) -> torch.Tensor:
            if t.__class__ is not XLAShardedTensor:
                return t
            if id(t) not in moved:
                moved[id(t)] = to_host(t)
            return moved[id(t)]

        host_args = [inference.map_tensors(a, down) for a in args]
        host_kwargs = {n: inference.map_tensors(a, down) for n, a in kwargs.items()}
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = torch.device("cpu")
        result = func(*host_args, **host_kwargs)
        given = {**dict(zip(facts.names, args)), **kwargs}
        back: dict[int, torch.Tensor] = {}
        for name in facts.written:
            targets = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
            for t in targets:
                if t.__class__ is XLAShardedTensor:
                    host = moved[id(t)]
                    if host.shape != t.shape:
                        _resize(t, host.shape)
                    _copy_((t, host), _NO_KWARGS)
                    back[id(host)] = t
        return _up(result, back)

    return handler


def _up(result: Any, back: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return back[id(result)] if id(result) in back else from_host(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_up(x, back) for x in result)
    return result


def _make_handler(func: Any) -> Handler:
    special = _SPECIAL.get(func)
    if special is not None:
        return special
    facts = schema.of(func)
    lowering = registry.find(func)
    if lowering is not None:
        return _view_handler(lowering) if facts.is_view else _functional_handler(lowering)
    if facts.written:
        form = schema.functional(func)
        writes_lists = any("[]" in str(a.type) or "List" in str(a.type) for a in func._schema.arguments if a.name in facts.written)
        if form is not None and facts.out_names and not writes_lists:
            return _derived_out(func, form)
        if form is not None and facts.written == facts.names[:1] and not writes_lists:
            computed = registry.find(form)
            return _derived_in_place(func, form) if computed is None else _in_place_handler(func, computed)
    if schema.has_kernel(func, "CompositeImplicitAutograd"):
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    if schema.has_kernel(func, "CompositeExplicitAutograd"):
        return _composite_explicit(func)
    function = decomposition_table.get(func)
    return _host(func) if function is None else _decomposition(func, function)


def _with_positions(func: torch._ops.OpOverload) -> Handler:
    """`index`, `index_put`: a boolean mask selects a number of elements that only the data knows, so its positions are read on the host."""
    inner: list[Handler] = []

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not inner:
            lowering = registry.find(func if func is aten.index.Tensor else aten.index_put.default)
            inner.append(_functional_handler(lowering) if lowering.overload is func else _in_place_handler(func, lowering))
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
        return inner[0]((x, indices, *args[2:]), kwargs)

    return handler


def _native_batch_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm` moves the running statistics, which its schema does not say: the functional form, then two writes."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training or mean is None:
        empty_mean = mean if mean is not None else None
        form = aten._native_batch_norm_legit_no_training if not training else aten._native_batch_norm_legit.no_stats
        return form(x, weight, bias, empty_mean, var, momentum, eps) if not training else form(x, weight, bias, training, momentum, eps)
    out, save_mean, save_var, new_mean, new_var = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, training, momentum, eps)
    _store(mean, new_mean)
    _store(var, new_var)
    return out, save_mean, save_var


load_all()
_copy_on_device = _in_place_handler(aten.copy_.default, registry.find(aten.copy.default))
_SPECIAL: dict[Any, Handler] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.copy_.default: _copy_,
    aten.as_strided.default: _as_strided,
    aten.split.Tensor: _pieces(aten.split.Tensor),
    aten.split_with_sizes.default: _pieces(aten.split_with_sizes.default),
    aten.unbind.int: _pieces(aten.unbind.int),
    aten._local_scalar_dense.default: _item,
    aten.index.Tensor: _with_positions(aten.index.Tensor),
    aten.index_put_.default: _with_positions(aten.index_put_.default),
    aten.index_put.default: _with_positions(aten.index_put.default),
    aten._index_put_impl_.default: lambda args, kwargs: route(None, aten.index_put_.default, (), args[:4]),
    aten.native_batch_norm.default: _native_batch_norm,
    aten.resize_.default: _set_data,
    **{getattr(aten.set_, name): _set_data for name in aten.set_.overloads()},
}
XLAShardedTensor.__torch_dispatch__ = classmethod(route)  # type: ignore[assignment, method-assign]
