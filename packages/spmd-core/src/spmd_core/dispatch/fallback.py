"""What has no lowering: torch's own compositions and decompositions, whose pieces come back to the router, then the CPU, counted."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from spmd_core import metrics
from spmd_core.config import config
from spmd_core.dispatch.transfer import copy_, resize, to_host
from spmd_core.errors import HostFallbackError
from spmd_core.recording import inference, schema
from spmd_core.recording.calls import NO_KWARGS, Handler, from_host
from spmd_core.source_lines import user_frame, user_line
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# Some of torch's compositions are defined by each other (`frexp` by `frexp.Tensor_out` and the reverse): the second time around it is the host.
_MAX_NESTING = 4
_nesting: Counter[torch._ops.OpOverload] = Counter()


def _composed(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Handler:
    """Calls what torch composes the operation of; the host where that declines, or needs the operation itself."""
    fall_back = on_host(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if _nesting[func] >= _MAX_NESTING:
            return fall_back(args, kwargs)
        _nesting[func] += 1
        try:
            result = function(*args, **kwargs)
        finally:
            _nesting[func] -= 1
        return fall_back(args, kwargs) if result is NotImplemented else result

    return handler


def composite_explicit(func: torch._ops.OpOverload) -> Handler:
    """torch's own C++ composition, for instance foreach forms: its pieces come back here."""
    return _composed(
        func,
        partial(
            func.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
        ),
    )


def decomposition(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Handler:
    """torch's decomposition table; the host where it declines."""
    return _composed(func, function)


def on_host(func: torch._ops.OpOverload) -> Handler:
    """On the CPU: read the arguments, run, and take the results back; counted, and warned about once."""
    facts = schema.of(func)

    def handler(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.name()
        if config.strict:
            raise HostFallbackError(
                f"strict mode allows no operation on the host; {name} has neither a lowering nor a decomposition. "
                f"It was called at {user_line()}. Rewrite it with other operations, or leave strict mode."
            )
        filename, line, level = user_frame()
        if metrics.count_fallback(name, f"{filename}:{line}"):
            warnings.warn(
                f"{name} has no lowering for device 'xla' and runs on the host: it cuts the program and copies its arguments. "
                "Counted in metrics.host_fallbacks().",
                stacklevel=level,
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
                        resize(t, host.shape)
                    copy_((t, host), NO_KWARGS)
                    back[id(host)] = t
        return _up(result, back)

    return handler


def _up(result: Any, back: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return back[id(result)] if id(result) in back else from_host(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_up(x, back) for x in result)
    return result
