"""Records the call of a torch operation as a value of the graph.

What is inferred of a call is kept as an `Entry`, memoised on the overload, the inputs' specs and
the static arguments. This is the hot path of the system: `benchmarks/op_overhead.py` measures its
cost per operation.

An error in the shapes of a call is raised here, at the user's line: `recording.inference` asks
torch's meta kernel for shapes and dtypes, and `recording.cpu_kernels` the CPU's kernel for errors
and strides.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import torch

from spmd_core import counters, dtypes
from spmd_core.config import config
from spmd_core.errors import DeviceMismatchError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage, View, read
from spmd_core.graph.strides import is_dense
from spmd_core.graph.values import Entry, Indices, OpResult, Spec, Value
from spmd_core.ops import registry
from spmd_core.program import leaves
from spmd_core.recording import cpu_kernels, inference, random_stream, schema
from spmd_core.recording.layouts import require_dense
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of, wrap

Handler = Callable[[Sequence[Any], dict[str, Any]], Any]
Made = TypeVar("Made")

# Entries by key; for views, their links and the positions that `recording.views` met (`_moves`). At
# most `config.max_op_entries`.
# Guarded by: the graph lock; the GIL (`setdefault`) for views and factories.
# Cleared by: calls.forget().
entries: dict[Any, Any] = {}
NUMBERS = frozenset({float, int, bool, complex})
# Recognised by identity.
# Guarded by: nothing, as it never changes. Cleared by: never.
NO_KWARGS: dict[str, Any] = {}
_default_dtype = torch.get_default_dtype
_TENSOR, _NUMBER = object(), object()
_MOST_ACCEPTED = 1024  # accepted numbers, and classes of them, that an entry remembers

registry.load_all()


class CallSchema:
    """One overload: which arguments are scalar inputs, and how to make an entry of a call."""

    __slots__ = ("func", "infer", "numbers", "static_when_int")

    def __init__(
        self,
        func: Any,
        static: frozenset[str],
        make_entry: Callable[..., Entry],
        numbers: frozenset[str] = frozenset(),
    ) -> None:
        facts = schema.of(func, static)
        self.func, self.infer = func, make_entry
        # By position and by name, as an argument may be passed either way.
        self.numbers = frozenset(facts.number_positions) | facts.number_names | numbers
        self.static_when_int = (
            frozenset(facts.names.index(n) for n in facts.static_when_int) | facts.static_when_int
        )


def look_up(
    call: CallSchema, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Entry, list[Value], list[Any]]:
    """The call's entry, its input values and its scalar inputs.

    The hot path: a few bytecodes per argument, and one lookup.
    """
    key: list[Any] = [call, _default_dtype()]
    inputs: list[Value] = []
    numbers: list[Any] = []
    for a in args:
        kind = a.__class__
        if kind is XLAShardedTensor:
            handle = a._handle
            key.append(handle.spec)
            inputs.append(handle.current() if handle.__class__ is View else handle.value)
        elif kind in NUMBERS:
            position = len(key) - 2
            if position in call.numbers and not (kind is int and position in call.static_when_int):
                key.append(kind)
                numbers.append(a)
            else:
                key.append(a)
        elif kind is list or kind is tuple:
            key.append(tuple(a) if a and a[0].__class__ is int else _look_up_list(call, a, inputs))
        elif isinstance(a, torch.Tensor):
            key.append(_host_scalar(call, a, inputs))
        else:
            key.append(a)
    if kwargs:
        _look_up_keywords(call, kwargs, key, inputs, numbers)
    whole = tuple(key)
    # As `known`, but inline: this is the hot path.
    entry = entries.get(whole)
    if entry is None:
        entry = call.infer(args, kwargs, tuple(n.__class__ for n in numbers))
        for out in entry.outs:
            inference.require_dtype(out.dtype)
        if inputs and any(cpu_kernels.may_not_fit(n, entry.spec.dtype) for n in numbers):
            entry.accepted = set()
        remember(whole, entry)
    if numbers and entry.accepted is not None:
        _refuse_numbers(call, entry.accepted, args, kwargs, numbers)
    return entry, inputs, numbers


def _refuse_numbers(
    call: CallSchema,
    accepted: set[tuple[Any, ...]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    numbers: list[Any],
) -> None:
    """Raises what eager torch raises for the values of scalar inputs, which no key contains."""
    given = tuple(numbers)
    if given in accepted:
        return
    classes = tuple(map(cpu_kernels.number_class, numbers))
    holds_for_all = classes in accepted or cpu_kernels.refuse_numbers(call.func, args, kwargs)
    if len(accepted) >= _MOST_ACCEPTED:
        accepted.clear()
    accepted |= {given, classes} if holds_for_all else {given}


def _look_up_keywords(
    call: CallSchema,
    kwargs: dict[str, Any],
    key: list[Any],
    inputs: list[Value],
    numbers: list[Any],
) -> None:
    for name, a in kwargs.items():
        kind = a.__class__
        if kind is XLAShardedTensor:
            key.append((name, a._handle.spec))
            inputs.append(read(a._handle))
        elif (
            kind in NUMBERS
            and name in call.numbers
            and not (kind is int and name in call.static_when_int)
        ):
            key.append((name, kind))
            numbers.append(a)
        elif kind is list or kind is tuple:
            key.append((name, _look_up_list(call, a, inputs)))
        elif isinstance(a, torch.Tensor):
            key.append((name, _host_scalar(call, a, inputs)))
        elif name != "generator":  # the generator is not recorded: only the seed that it gave
            key.append((name, a))


def _look_up_list(call: CallSchema, items: Sequence[Any], inputs: list[Value]) -> Any:
    key: list[Any] = ["["]
    for a in items:
        if a.__class__ is XLAShardedTensor:
            key.append(a._handle.spec)
            inputs.append(read(a._handle))
        elif isinstance(a, torch.Tensor):
            key.append(_host_scalar(call, a, inputs))
        else:
            key.append((a.__class__, a))
    return tuple(key)


def _host_scalar(call: CallSchema, a: torch.Tensor, inputs: list[Value]) -> Spec:
    """Makes a 0-dim CPU tensor among the arguments an input, as torch allows for any device.

    Raises:
        DeviceMismatchError: any other tensor that is not on the device.
        UnsupportedOpError: a tensor that cannot be moved there, as it is not dense.
    """
    if a.dim() != 0 or a.device.type != "cpu":
        require_dense(a, f"an argument of {call.func}")
        raise DeviceMismatchError(
            f"all tensors of an operation must be on one device; {call.func} got a {a.dtype} "
            f"tensor of shape {tuple(a.shape)} on {a.device} "
            "beside tensors on xla:0. Move it with .to('xla')."
        )
    inputs.append(host_leaf(a).value)
    return Spec.from_tensor(a)


def known(key: Any, make: Callable[[], Made]) -> Made:
    """The entry under `key`, made by `make()` and kept if there is none."""
    found: Made | None = entries.get(key)
    if found is None:
        found = remember(key, make())
    return found


def remember(key: Any, entry: Made) -> Made:
    """Keeps an entry under its key; drops the oldest quarter at `config.max_op_entries` entries.

    Returns:
        The entry, or the one that another thread kept under the key while this one was made:
        programs are compared by the identity of their entries.
    """
    if len(entries) >= config.max_op_entries:
        oldest = list(entries)[: config.max_op_entries // 4]
        for old in oldest:
            entries.pop(old, None)
        counters.count("op_entries_dropped", len(oldest))
    if entry.__class__ is Entry:
        entry.key = key  # type: ignore[attr-defined]
    return entries.setdefault(key, entry)


def forget() -> None:
    """Drops every entry, as in a new process; values that are already recorded stay valid."""
    entries.clear()


def record_own(entry: Entry, inputs: Sequence[torch.Tensor], numbers: Sequence[float] = ()) -> Any:
    """Records an operation that torch does not have; returns a tensor, or a tuple of results.

    Args:
        entry: the operation, from `known`.
        inputs: tensors on the device, with the specs that the entry was made for.
        numbers: the scalar inputs, one for each of the entry's `number_kinds`.
    """
    with lock:
        node = Value(entry, tuple(read(t._handle) for t in inputs), numbers)  # type: ignore[attr-defined]
        if entry.structure is not None:
            return _structured(entry, node)
        return wrap(Storage(node, entry.spec))


def mixed(entry: Entry, inputs: Sequence[Value]) -> tuple[Entry, list[Value]]:
    """A random operation that mixes the position of `random_stream.mixing` into its key."""

    def make() -> Entry:
        def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> Any:
            assert context.key is not None, "a random operation has a key"
            inner = replace(context, key=jax.random.fold_in(context.key, inputs[-1]))
            return entry.kernel(inner, inputs[:-1], numbers)

        return Entry(
            entry.name,
            kernel,
            entry.outs,
            structure=entry.structure,
            as_list=entry.as_list,
            number_kinds=entry.number_kinds,
            random=True,
            arguments=entry.arguments,
            traits=entry.traits,
        )

    assert random_stream.position.make is not None
    tensor = random_stream.position.make()
    assert isinstance(tensor, XLAShardedTensor)
    return known(("mixed", entry), make), [*inputs, read(tensor._handle)]


def host_leaf(tensor: torch.Tensor, spec: Spec | None = None) -> Storage:
    """A storage over a private copy of a CPU tensor."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format)
    return Storage.of_leaf(
        spec or Spec.contiguous(tuple(data.shape), data.dtype), data, leaves.host_placement()
    )


def from_host(tensor: torch.Tensor) -> XLAShardedTensor:
    """A CPU tensor's values as a tensor on the device, uploaded when a program first needs them.

    It has the strides of the CPU tensor, if these leave no gap.
    """
    dtypes.to_jax(tensor.dtype)
    spec = Spec.from_tensor(tensor)
    keeps = not tensor.numel() or is_dense(spec.shape, spec.strides)
    return wrap(host_leaf(tensor, spec if keeps else None))


def new_entry(
    lowering: registry.Lowering,
    result: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kinds: tuple[type, ...],
    into: Spec | None = None,
    replaces: tuple[int, ...] = (),
) -> Entry:
    """A new entry: the lowering with every static argument bound.

    Args:
        lowering: the operation's.
        result: what torch infers, on meta tensors.
        args: of the call.
        kwargs: of the call.
        kinds: the types of the call's numbers.
        into: for an in-place operation, the spec that the result is converted and broadcast to.
        replaces: as of `Entry`.
    """
    outs, structure, as_list = inference.flatten(result)
    arguments = _named_arguments(lowering, args, kwargs)
    return Entry(
        lowering.overload.name(),
        _kernel(lowering, args, kwargs, outs, into),
        outs if into is None else (into,),
        structure=None if into is not None else structure,
        as_list=as_list,
        number_kinds=(*kinds, int) if lowering.random else kinds,
        random=lowering.random,
        arguments=arguments,
        indices=() if lowering.indices is None else _indices(lowering, arguments),
        traits=lowering.traits,
        replaces=replaces,
    )


def _named_arguments(
    lowering: registry.Lowering, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The call's arguments in the form of `Entry.arguments`."""
    facts = schema.of(lowering.overload, lowering.static)
    plan, keywords = _bind(facts, lowering, args, kwargs)
    named: dict[str, Any] = {"torch.get_default_dtype()": _default_dtype()}
    planned = facts.by_name(plan, keywords)
    for name, given in facts.by_name(args, kwargs).items():
        if name in planned:
            named[name] = _static(planned[name], given)
    return named


def _indices(lowering: registry.Lowering, arguments: dict[str, Any]) -> tuple[Indices, ...]:
    """What the operation accepts in its inputs, which are the specs among the arguments."""
    assert lowering.indices is not None
    inputs: dict[tuple[str, int | None], int] = {}
    for name, given in arguments.items():
        is_list = isinstance(given, tuple)
        for item, x in enumerate(given if is_list else (given,)):
            if isinstance(x, Spec):
                inputs[name, item if is_list else None] = len(inputs)
    schema_arguments = lowering.overload._schema.arguments
    defaults = {a.name: a.default_value for a in schema_arguments if a.has_default_value()}
    return tuple(
        Indices(inputs[rule.argument, rule.item], rule.low, rule.high, rule.skip)
        for rule in lowering.indices({**defaults, **arguments})
    )


def _static(planned: Any, given: Any) -> Any:
    """One argument in the form of `Entry.arguments`, from its planned form and its value."""
    if planned is _TENSOR:
        return spec_of(given)
    if planned is _NUMBER:
        return type(given)
    if isinstance(planned, list):
        return tuple(_static(p, a) for p, a in zip(planned, given))
    return planned


def _bind(
    facts: schema.Schema, lowering: registry.Lowering, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with a placeholder for each tensor and each number."""

    def place(name: str, a: Any, *, in_list: bool = False) -> Any:
        if isinstance(a, torch.Tensor):
            return _TENSOR
        if isinstance(a, (list, tuple)):
            return [place(name, x, in_list=True) for x in a]
        may_be_number = name in lowering.numbers or (
            name in facts.number_names and name not in lowering.static
        )
        is_number = may_be_number and not in_list and a.__class__ in NUMBERS
        return (
            _NUMBER
            if is_number and not (a.__class__ is int and name in facts.static_when_int)
            else a
        )

    plan = [place(name, a) for name, a in zip(facts.names, args)]
    return plan, {name: place(name, a) for name, a in inference.without_placement(kwargs).items()}


def _fill(plan: Any, inputs: Any, numbers: Any) -> Any:
    if plan is _TENSOR:
        return next(inputs)
    if plan is _NUMBER:
        return next(numbers)
    return [_fill(x, inputs, numbers) for x in plan] if isinstance(plan, list) else plan


def _kernel(
    lowering: registry.Lowering,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: tuple[Spec, ...],
    into: Spec | None,
) -> Callable[..., list[Any]]:
    plan, keywords = _bind(schema.of(lowering.overload, lowering.static), lowering, args, kwargs)
    contexts = tuple(registry.Out(s.shape, s.dtype) for s in outs)

    def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        arrays, scalars = iter(inputs), iter(numbers)
        context.outs = contexts
        filled = [_fill(p, arrays, scalars) for p in plan]
        result = lowering.function(
            context, *filled, **{name: _fill(p, arrays, scalars) for name, p in keywords.items()}
        )
        results = (
            [x for x in result if x is not None] if isinstance(result, (tuple, list)) else [result]
        )
        return (
            results
            if into is None
            else [jnp.broadcast_to(results[0].astype(dtypes.to_jax(into.dtype)), into.shape)]
        )

    return kernel


def _structured(entry: Entry, node: Value) -> Any:
    assert entry.structure is not None
    results = [
        None if i is None else wrap(Storage(OpResult(node, i), entry.outs[i]))
        for i in entry.structure
    ]
    return results if entry.as_list else tuple(results)


def functional_handler(lowering: registry.Lowering) -> Handler:
    """Records an operation whose results are new tensors."""
    func = lowering.overload
    call = CallSchema(
        func,
        lowering.static,
        lambda args, kwargs, kinds: new_entry(
            lowering,
            inference.infer(func, args, kwargs, spec_of, meta=lowering.meta),
            args,
            kwargs,
            kinds,
        ),
    )

    def record(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            entry, inputs, numbers = look_up(call, args, kwargs)
            node = Value(entry, inputs, numbers)
            if entry.structure is not None:
                return _structured(entry, node)
            return wrap(Storage(node, entry.spec))

    def record_random(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with lock:
            entry, inputs, numbers = look_up(call, args, kwargs)
            numbers.append(random_stream.draw(kwargs.get("generator")))
            if random_stream.position.make is not None:
                entry, inputs = mixed(entry, inputs)
            node = Value(entry, inputs, numbers)
            return (
                _structured(entry, node)
                if entry.structure is not None
                else wrap(Storage(node, entry.spec))
            )

    if not lowering.random:
        return record
    position = schema.generator_position(func)
    if position is None:
        return record_random

    def record_random_by_name(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) > position:
            args, kwargs = args[:position], {**kwargs, "generator": args[position]}
        return record_random(args, kwargs)

    return record_random_by_name


def inherit(result: XLAShardedTensor, source: Any) -> None:
    """Gives a result the sharding of its source, if their shapes agree."""
    if source.__class__ is XLAShardedTensor:
        sharding = source._handle.sharding
        if sharding is not None and result._handle.spec.shape == source._handle.spec.shape:
            result._handle.sharding = sharding
