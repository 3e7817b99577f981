"""Handlers of single ATen overloads that need more than a lowering or torch's composition."""

from collections.abc import Sequence
from typing import Any

import torch

from spmd_core import releases
from spmd_core.dispatch import set_resize
from spmd_core.dispatch.transfer import store
from spmd_core.recording import cpu_kernels, schema
from spmd_core.recording.calls import NO_KWARGS, Handler

aten = torch.ops.aten


def _native_batch_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm` updates the running statistics, which its schema does not say.

    The functional form computes them, then two writes store them.
    """
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training:
        return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    out, save_mean, save_var, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    store(mean, new_mean)
    store(var, new_var)
    return out, save_mean, save_var


def _native_batch_norm_out(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    cpu_kernels.refuse(aten._native_batch_norm_legit.out, args, kwargs)
    outs = [kwargs[name] for name in ("out", "save_mean", "save_invstd")]
    for out, result in zip(outs, _native_batch_norm(args, NO_KWARGS)):
        if out.shape != result.shape:
            set_resize.resize_((out, result.shape), NO_KWARGS)
        store(out, result)
    return tuple(outs)


def _rrelu_with_noise(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`rrelu_with_noise`, which writes the drawn slopes into `noise`.

    Without training it draws nothing, so that torch's generator keeps its state.
    """
    given = schema.of(aten.rrelu_with_noise.default).by_name(args, kwargs)
    lower, upper = given.get("lower", 1 / 8), given.get("upper", 1 / 3)
    if not given.get("training", False):
        return aten.leaky_relu(given["self"], (lower + upper) / 2)
    result, noise = aten.rrelu_with_noise_functional(
        given["self"], given["noise"], lower, upper, True, given.get("generator")
    )
    store(given["noise"], noise)
    return result


_HANDLERS: dict[str, Handler] = {
    "aten.native_batch_norm.default": _native_batch_norm,
    "aten._native_batch_norm_legit.default": _native_batch_norm,
    "aten._native_batch_norm_legit.out": _native_batch_norm_out,
    "aten.rrelu_with_noise.default": _rrelu_with_noise,
    "aten.rrelu_with_noise_.default": lambda args, kwargs: store(
        args[0], _rrelu_with_noise(args, kwargs)
    ),
}
HANDLERS = releases.overloads(_HANDLERS)
