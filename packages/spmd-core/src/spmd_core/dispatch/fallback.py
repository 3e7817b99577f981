"""Handlers of overloads without a lowering: torch's compositions, decompositions, then the CPU."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from spmd_core import counters
from spmd_core.config import config
from spmd_core.dispatch.transfer import copy_, resize, to_host
from spmd_core.errors import HostFallbackError, PlanReadError
from spmd_core.recording import cpu_kernels, inference, schema
from spmd_core.recording.calls import NO_KWARGS, Handler, from_host
from spmd_core.source_lines import user_frame, user_line
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# Some of torch's compositions call each other (`frexp` calls `frexp.Tensor_out` and the reverse).
# Deeper nesting than this runs on the host.
_MAX_NESTING = 4
_NO_LOWERING = "has neither a lowering for device 'xla' nor a decomposition"


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.nesting: Counter[torch._ops.OpOverload] = Counter()


# How deep this thread is in torch's compositions.
# Guarded by: thread-local storage. Cleared by: the end of each call.
_thread = _ThreadState()


def _composed(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Handler:
    """Calls torch's composition; runs on the host if it declines or needs the operation itself."""
    fall_back = on_host(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nesting = _thread.nesting
        if nesting[func] >= _MAX_NESTING:
            return fall_back(args, kwargs)
        nesting[func] += 1
        try:
            result = function(*args, **kwargs)
        finally:
            nesting[func] -= 1
        return fall_back(args, kwargs) if result is NotImplemented else result

    return handler


def composite_explicit(func: torch._ops.OpOverload) -> Handler:
    """A handler for torch's own C++ compositions, such as foreach forms.

    The parts are dispatched to the router. In eager torch autograd counts the writes of the parts,
    but not those that are recorded below it: the writes to the tensors of a list are counted here.
    """
    lists = written_lists(func)
    compose = _composed(
        func,
        partial(
            func.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
        ),
    )
    if not lists:
        return compose

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = compose(args, kwargs)
        given = schema.of(func).by_name(args, kwargs)
        count_writes(t for name in lists for t in given[name])
        return result

    return handler


def written_lists(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """The written arguments that are lists of tensors: `_foreach_add_(self!)`, `out!` of lists."""
    written = schema.of(func).written
    return tuple(
        a.name for a in func._schema.arguments if a.name in written and "List" in str(a.type)
    )


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Counts one write of each tensor, for autograd's check of what it saved for the backward."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def decomposition(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Handler:
    """An entry of torch's decomposition table; the host runs calls that it declines."""
    compose = _composed(func, function)
    is_written = bool(schema.of(func).written)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        answer = cpu_kernels.ask(func, args, kwargs)
        if answer.error is not None:  # the decomposition may accept more
            raise cpu_kernels.again(answer.error)
        result = compose(args, kwargs)
        return result if is_written or answer.results is None else _restrided(result, answer)

    return handler


def _restrided(result: Any, answer: cpu_kernels.Answer) -> Any:
    """New tensors with the strides of eager torch; the decomposition may give others."""
    if isinstance(result, torch.Tensor):
        strides = cpu_kernels.strides_of(answer.results, tuple(result.shape))
        if strides is None or all(
            n == 1 or old == new for n, old, new in zip(result.shape, result.stride(), strides)
        ):
            return result
        made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
        return copy_((made, result), NO_KWARGS)
    if not isinstance(result, (list, tuple)) or not isinstance(answer.results, tuple):
        return result
    new = [_restrided(x, replace(answer, results=r)) for x, r in zip(result, answer.results)]
    return type(result)(new) if type(result) in (list, tuple) else result


def note_host_run(
    name: str,
    why: str = _NO_LOWERING,
    strict_advice: str = "Rewrite it with other operations, or leave strict mode.",
) -> None:
    """Counts an operation that is about to run on the CPU, and warns at its first run.

    Args:
        name: of the overload.
        why: the reason, as the continuation of a sentence that begins with the name.
        strict_advice: what to do if strict mode refuses it.

    Raises:
        HostFallbackError: in strict mode.
    """
    if config.strict:
        raise HostFallbackError(
            f"strict mode allows no operation on the host; {name} {why}. "
            f"It was called at {user_line()}. {strict_advice}"
        )
    filename, line, level = user_frame()
    if counters.count_fallback(name, f"{filename}:{line}"):
        warnings.warn(
            f"{name} {why} and runs on the host: it cuts the program and copies its arguments. "
            "Counted in metrics.host_fallbacks().",
            stacklevel=level,
        )


def on_host(func: torch._ops.OpOverload, why: str = _NO_LOWERING) -> Handler:
    """A handler that runs the overload on the CPU; counted, and warned about once.

    Reads the arguments, runs the overload, and takes the results back to the device. In a plan,
    which computes no values, PlanReadError names the overload.

    Args:
        func: the overload.
        why: as for `note_host_run`.
    """
    facts = schema.of(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        note_host_run(func.name(), why)
        on_cpu: dict[int, torch.Tensor] = {}

        def to_cpu(t: torch.Tensor) -> torch.Tensor:
            if t.__class__ is not XLAShardedTensor:
                return t
            if id(t) not in on_cpu:
                try:
                    on_cpu[id(t)] = to_host(t)
                except PlanReadError as error:
                    raise PlanReadError(
                        "a plan computes no values, so what is planned must run no operation on "
                        f"the host; {func.name()} {why}, and reads a tensor's values at "
                        f"{user_line()}. Rewrite it with other operations, or call it after the "
                        "steps."
                    ) from error
            return on_cpu[id(t)]

        host_args = [inference.map_tensors(a, to_cpu) for a in args]
        host_kwargs = {n: inference.map_tensors(a, to_cpu) for n, a in kwargs.items()}
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = torch.device("cpu")
        result = func(*host_args, **host_kwargs)
        given = facts.by_name(args, kwargs)
        written_tensors: dict[int, torch.Tensor] = {}
        for name in facts.written:
            targets = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
            for t in targets:
                if t.__class__ is XLAShardedTensor:
                    host = on_cpu[id(t)]
                    if host.shape != t.shape:
                        resize(t, host.shape)
                    copy_((t, host), NO_KWARGS)
                    written_tensors[id(host)] = t
        return _to_device(result, written_tensors)

    return handler


def _to_device(result: Any, written_tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return written_tensors[id(result)] if id(result) in written_tensors else from_host(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_to_device(x, written_tensors) for x in result)
    return result
