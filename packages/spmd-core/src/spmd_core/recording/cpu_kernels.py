"""Asks eager torch's CPU kernels what they refuse, and which strides their results have.

torch's meta kernels give the shapes and dtypes of results. They check less than the real kernels,
word their errors differently, and some give other strides. So a new call is executed once on the
CPU, on stand-ins: tensors of the same dtypes and layouts, which share memory where the call's
tensors do, with values that are valid for nearly every operation. Large tensors get smaller
stand-ins.

The answers are memoised: a call of the same kind runs no kernel again.

`benchmarks/refusals.py` compares what every operation refuses with eager torch, and
`benchmarks/strides.py` the strides.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch

from spmd_core.graph.strides import dense_strides, is_dense
from spmd_core.graph.values import Spec
from spmd_core.ops import registry
from spmd_core.recording import schema
from spmd_core.recording.stand_ins import (
    COUNT_FROM_1,
    WIDER,
    StandIn,
    StandInCall,
    Static,
    fractions_and_ones,
    leaves_of,
    map_leaves,
    memory_of,
    ones_and_zeros,
    smaller,
    with_wider_dtype,
)
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, spec_of

# Arguments that say where results are stored: neither lowerings nor inference need them.
PLACEMENT_KEYWORDS = ("layout", "pin_memory", "generator", "non_blocking", "device")
# A call of at most `_SMALL` elements, results included, runs in its own sizes. A larger one is made
# smaller; if it has no smaller form, its own sizes are used up to `_LARGEST`.
_SMALL, _LARGEST = 1 << 14, 1 << 22
_NUMBERS = (bool, int, float, complex)
# These take lengths that must have a given sum, which stand-ins do not have. They run only to
# obtain torch's error message, after the meta kernel has refused a call.
_REFUSE_STAND_INS = ("_ctc_loss", "repeat_interleave", "segment_reduce")
# Operations on integers that other devices than the CPU have.
_OF_INTEGERS_ELSEWHERE = ("histc",)
# torch's errors for calls that only the CPU's libraries cannot compute.
_OF_THE_CPU = re.compile(r"not implemented on the CPU|MKL FFT error")


@dataclass(frozen=True)
class Answer:
    """What eager torch does with a call.

    Attributes:
        error: what it raises, or None.
        results: the specs of its results, in torch's structure; None where it was not asked.
        metas: if smaller stand-ins were used, the meta kernel's specs for these.
        has_dtypes: whether the results' dtypes are those of the call, not of a wider one.
    """

    error: Exception | None = None
    results: Any = None
    metas: Any = None
    has_dtypes: bool = True


_UNKNOWN = Answer()


def ask(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any = None,
    *,
    is_refused: bool = False,
    number: Callable[[Any], Any] | None = None,
) -> Answer:
    """What eager torch does with this call.

    Args:
        func: the overload.
        args: of the call; only the specs of tensors, and which memory they share, matter.
        kwargs: of the call.
        result: what the meta kernel returned, or None.
        is_refused: whether the meta kernel refused the call.
        number: gives the value to use for a scalar input of the program. None: the answer should
            hold for most values.
    """
    if not _can_be_asked(func, is_refused):
        return _UNKNOWN
    facts, numbers = schema.of(func), _numbers(func)
    memories: dict[int, int] = {}

    # Not recursive: a function that refers to itself is a cycle, and keeps what it refers to.
    def describe(name: str, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if not facts.written or not isinstance(a, XLAShardedTensor):
                return StandIn(spec_of(a))
            memory = memories.setdefault(id(a._handle.storage), len(memories))
            return StandIn(a._handle.spec, memory, a._handle.offset)
        if name in numbers and isinstance(a, _NUMBERS) and not is_refused:
            if number is not None:
                return Static(type(a), number(a), is_input=True, second=number(a))
            # Ascending in the order of the schema, as lower and upper bounds must be.
            kind, position = type(a), facts.names.index(name)
            return Static(kind, kind(1 + position), is_input=True, second=kind(0))
        # No random number drawn here is visible to the user.
        return Static(type(None), None) if isinstance(a, torch.Generator) else Static(type(a), a)

    call = StandInCall(
        func,
        tuple(map_leaves(a, partial(describe, name)) for name, a in zip(facts.names, args)),
        tuple(
            (name, map_leaves(a, partial(describe, name)))
            for name, a in (*_left_out(func), *kwargs.items())
            if name == "generator" or name not in PLACEMENT_KEYWORDS
        ),
    )
    if memories:
        users = Counter(a.memory for a in call.stand_ins())
        call = call.map(
            lambda a: StandIn(a.spec) if isinstance(a, StandIn) and users[a.memory] == 1 else a
        )
    size = sum(a.spec.num_elements for a in call.stand_ins())
    size += sum(t.numel() for t in leaves_of(result) if isinstance(t, torch.Tensor))
    return _answer(call, torch.get_default_dtype(), size <= _SMALL, size <= _LARGEST)


def refuse(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Raises what eager torch raises for this call.

    Returns:
        Whether eager torch is known to accept the call.
    """
    answer = ask(func, args, kwargs)
    if answer.error is not None:
        raise again(answer.error)
    return answer.results is not None


def may_not_fit(a: Any, dtype: torch.dtype) -> bool:
    """Whether eager torch may refuse a number of this type, by its value, for results of a dtype.

    Floats that overflow float32 or bfloat16 are not considered: checking them would cost every
    step.
    """
    if type(a) is complex:
        return not dtype.is_complex
    return not (dtype.is_complex or dtype in (torch.bfloat16, torch.float32, torch.float64))


def number_class(a: Any) -> Any:
    """The integer of the largest magnitude with as many bits; that of the whole part of a float.

    A multiple of 256 is its own class: it may be 0 in a narrow dtype.
    """
    if type(a) is float and math.isfinite(a):
        return float(number_class(int(a)))
    if type(a) is not int or a % 256 == 0:
        return a
    return (1 << a.bit_length()) - 1 if a >= 0 else -1 << (~a).bit_length()


def refuse_numbers(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Raises what eager torch raises for the numbers of this call: a division by 0, an overflow.

    Returns:
        Whether eager torch accepts all numbers of the same classes.
    """
    if ask(func, args, kwargs, number=number_class).error is None:
        return True
    answer = ask(func, args, kwargs, number=lambda a: a)
    if answer.error is not None:
        raise again(answer.error)
    return False


def again(error: Exception) -> Exception:
    """The error as a new one: a traceback would keep its frames, and so the user's tensors."""
    return type(error)(*error.args)


@cache
def _can_be_asked(func: torch._ops.OpOverload, is_refused: bool) -> bool:
    """Whether the overload is torch's own, has a CPU kernel, and makes no view."""
    name = func._schema.name.removeprefix("aten::")
    return (
        func.namespace == "aten"
        and not schema.of(func).is_view
        and (is_refused or not (name in _REFUSE_STAND_INS or _reads_statistics(name)))
        and torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU")
    )


def _reads_statistics(name: str) -> bool:
    """Whether it is the gradient of a norm, whose CPU kernel takes 16-bit statistics.

    Those that the device saved are float32: see `_ROUND_STATISTICS`.
    """
    return "norm" in name and name.endswith("_backward")


@cache
def _left_out(func: torch._ops.OpOverload) -> tuple[tuple[str, None], ...]:
    """Keyword arguments without a default that torch omits where they are None."""
    return tuple(
        (a.name, None)
        for a in func._schema.arguments
        if a.kwarg_only and not a.has_default_value() and "Optional" in str(a.type)
    )


@cache
def _numbers(func: torch._ops.OpOverload) -> frozenset[str]:
    """The arguments whose numbers are inputs of a program, not part of an entry's key."""
    form = func if registry.find_lowering(func) is not None else schema.functional(func)
    lowering = None if form is None else registry.find_lowering(form)
    facts = schema.of(func, frozenset() if lowering is None else lowering.static)
    return facts.number_names - facts.static_when_int


@lru_cache(maxsize=8192)
def _answer(
    call: StandInCall, default_dtype: torch.dtype, is_small: bool, is_feasible: bool
) -> Answer:
    small = None if is_small else smaller(call)
    if small is not None:
        answer = _answer_for_any_size(small, default_dtype)
        if answer is not None:
            return answer
    return _carry_out(call) if is_small or is_feasible else _UNKNOWN


@lru_cache(maxsize=8192)
def _answer_for_any_size(small: StandInCall, default_dtype: torch.dtype) -> Answer | None:
    """The answer for all calls that reduce to this one; None if their own sizes may matter."""
    metas = _meta_specs(small)
    if metas is None:
        return None
    answer = _carry_out(small)
    # Another error may be due to the reduced sizes.
    is_right = answer.error is None or _is_for_the_dtypes(small)
    return replace(answer, metas=metas) if is_right else None


def _carry_out(call: StandInCall) -> Answer:
    """What the CPU kernel does. It refuses a call only if it refuses it for two sets of values."""
    first: Exception | None = None
    with torch.no_grad(), _in_silence(call.func):
        name = call.func._schema.name.removeprefix("aten::")
        fills = (ones_and_zeros, fractions_and_ones)
        for fill in fills[1:] if name in COUNT_FROM_1 else fills:
            try:
                is_second = fill is fractions_and_ones
                return Answer(results=_specs(call.run(memory_of(call, fill), is_second=is_second)))
            except NotImplementedError as error:
                if name in _OF_INTEGERS_ELSEWHERE:
                    return _UNKNOWN
                wider = call.map(with_wider_dtype)
                if wider == call:
                    return Answer(again(error))
                answer = _carry_out(wider)
                is_missing = isinstance(answer.error, NotImplementedError)
                kept = again(error) if is_missing else None
                return Answer(kept, answer.results, has_dtypes=False)
            except torch.linalg.LinAlgError:  # a rule about values
                return _UNKNOWN
            except Exception as error:
                if _OF_THE_CPU.search(str(error)):
                    return _UNKNOWN
                # Not the error itself: its traceback refers to this frame, and so to the tensors of
                # the callers, which would live on until Python collects the circle.
                first = first or again(error)
    return Answer(first)


@contextmanager
def _in_silence(func: torch._ops.OpOverload) -> Iterator[None]:
    """Suppresses warnings, which the call itself gives, and keeps torch's random state."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        if torch.Tag.nondeterministic_seeded in func.tags:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        yield


def _specs(result: Any) -> Any:
    return map_leaves(
        result, lambda x: Spec.from_tensor(x) if isinstance(x, torch.Tensor) else None
    )


# Smaller stand-ins for large tensors.


def _meta_specs(call: StandInCall) -> Any:
    """The meta kernel's specs of the results, or None if it refuses the call."""
    make = lambda a: torch.empty_strided(  # noqa: E731
        a.spec.shape, a.spec.strides, dtype=a.spec.dtype, device="meta"
    )
    with torch.no_grad(), _in_silence(call.func):
        try:
            return _specs(call.run(make))
        except Exception:  # the smaller sizes do not fit each other
            return None


def _is_for_the_dtypes(call: StandInCall) -> bool:
    """Whether a refused call is accepted with other dtypes, so that its sizes are right."""
    floats = dict.fromkeys((torch.float64, torch.float16, torch.bfloat16), torch.float32)
    narrow = dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), torch.int64)
    every = dict.fromkeys((*floats, *narrow, torch.int64, torch.bool), torch.float32)
    complexes = {torch.complex64: torch.float32, torch.complex128: torch.float32}
    for table in ({**floats, **narrow, **WIDER, **complexes}, {**every, **WIDER, **complexes}):

        def convert(a: Any, to: dict[torch.dtype, torch.dtype] = table) -> Any:
            if isinstance(a, StandIn):
                spec = a.spec
                dtype = to.get(spec.dtype, spec.dtype)
                return StandIn(Spec.of(spec.shape, spec.strides, dtype), a.memory, a.offset)
            return Static(a.kind, to.get(a.value, a.value)) if a.kind is torch.dtype else a

        if _carry_out(call.map(convert)).error is None:
            return True
    return False


# The strides and dtypes of results.

# The CPU kernels of these round the saved statistics to 16 bits; meta kernels, and those of other
# devices, keep float32.
_ROUND_STATISTICS = ("native_batch_norm", "_native_batch_norm", "_batch_norm", "native_layer_norm")


def corrected(func: torch._ops.OpOverload, result: Any, answer: Answer) -> Any:
    """A meta kernel's result with the strides and dtypes that eager torch gives it."""
    if answer.results is None:
        return result
    metas = result if answer.metas is None else answer.metas
    name = func._schema.name.removeprefix("aten::")
    has_dtypes = answer.has_dtypes and not name.startswith(_ROUND_STATISTICS)
    if isinstance(result, torch.Tensor):
        return _corrected(result, answer.results, metas, has_dtypes)
    if not isinstance(answer.results, tuple) or len(result) != len(answer.results):
        return result
    new = [_corrected(*each, has_dtypes) for each in zip(result, answer.results, metas)]
    return new if isinstance(result, list) else tuple(new)


def _corrected(meta: Any, right: Any, asked: Any, has_dtypes: bool) -> Any:
    """One result.

    Args:
        meta: by the meta kernel.
        right: the spec by the CPU kernel.
        asked: the meta kernel's spec for the sizes that the CPU kernel ran with, or `meta`.
        has_dtypes: whether the CPU kernel's dtype counts.
    """
    if not isinstance(meta, torch.Tensor) or not isinstance(right, Spec):
        return meta
    strides = meta.stride()
    if asked is meta:
        strides = right.strides if right.shape == meta.shape else strides
    elif (
        isinstance(asked, Spec)
        and right.shape == asked.shape
        and right.strides != asked.strides
        and is_dense(right.shape, right.strides)
    ):
        strides = dense_strides(tuple(meta.shape), right.shape, right.strides)
    dtype = right.dtype if has_dtypes else meta.dtype
    if strides == meta.stride() and dtype is meta.dtype:
        return meta
    return torch.empty_strided(meta.shape, strides, dtype=dtype, device="meta")


def strides_of(right: Any, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a result of this shape, from a spec of `Answer.results`.

    None if the spec does not determine them, or the CPU kernel's result has another rank.
    """
    if not isinstance(right, Spec) or len(right.shape) != len(shape):
        return None
    if right.shape == shape:
        return right.strides
    dense = is_dense(right.shape, right.strides)
    return dense_strides(shape, right.shape, right.strides) if dense else None
