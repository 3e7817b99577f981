"""Infers shapes, strides and dtypes of an operation's results, by torch's own meta kernels.

The caller memoises the results: this runs once for each distinct call.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.graph.values import Spec
from spmd_core.recording.layouts import Layout, refusal

# Where the results are stored concerns neither shape inference nor a lowering.
_PLACEMENT_KEYWORDS = ("layout", "pin_memory", "generator", "non_blocking")


def meta_like(spec: Spec) -> torch.Tensor:
    """A meta tensor of this spec, at the beginning of its storage."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """An argument with `function` applied to its tensors, also those in lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return [map_tensors(x, function) for x in tree]
    return tree


def infer(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    spec_of: Callable[[torch.Tensor], Spec],
    *,
    meta: Callable[..., Any] | None = None,
) -> Any:
    """What `func` returns for these arguments, with meta tensors in place of tensors.

    Raises what torch raises for bad arguments.

    Args:
        func: the overload.
        args: of the call.
        kwargs: of the call.
        spec_of: the spec of a tensor argument.
        meta: called in place of the meta kernel, where torch has none or one whose checks are for
            another device only.
    """
    if kwargs.get("layout") not in (None, torch.strided):
        raise refusal(Layout.SPARSE, f"{func.name()} with layout={kwargs['layout']}")
    metas: dict[int, torch.Tensor] = {}

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in metas:
            metas[id(t)] = meta_like(spec_of(t))
        return metas[id(t)]

    meta_args = [map_tensors(a, to_meta) for a in args]
    meta_kwargs = {
        name: map_tensors(a, to_meta) for name, a in kwargs.items() if name != "pin_memory"
    }
    if "generator" in meta_kwargs:
        # Nothing is drawn here, and torch refuses a generator of another device.
        meta_kwargs["generator"] = None
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            result = (meta or func)(*meta_args, **meta_kwargs)
    except NotImplementedError:  # there is no meta kernel; the call may be right
        raise
    except Exception as error:
        raise (_eager_error(func, meta_args, meta_kwargs) or error) from None
    given = {**dict(zip((a.name for a in func._schema.arguments), args)), **kwargs}
    suspicious = _UNCHECKED.get(func.name())
    if suspicious is not None and suspicious(given):
        missed = _eager_error(func, meta_args, meta_kwargs)
        if missed is not None:
            raise missed
    return _corrected(func, result, given)


def _always(given: dict[str, Any]) -> bool:
    return True


def _odd_window(given: dict[str, Any]) -> bool:
    return min((*given["stride"], *given["dilation"], 1)) < 1 or min((*given["padding"], 0)) < 0


# Overloads whose CPU kernels refuse calls that the meta kernels accept, each with the condition on
# the arguments under which a call is tried on the CPU.
_UNCHECKED: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(
        (
            "aten::aminmax.out", "aten::as_strided_scatter", "aten::bucketize.Scalar",
            "aten::bucketize.Tensor", "aten::complex", "aten::complex.out", "aten::gather",
            "aten::gather.out", "aten::index_add", "aten::index_add_", "aten::index_reduce",
            "aten::index_reduce_", "aten::masked_scatter", "aten::masked_scatter_",
            "aten::multinomial", "aten::multinomial.out", "aten::scatter.src",
            "aten::scatter.value", "aten::scatter_add", "aten::uniform_",
        ),
        _always,
    ),
    "aten::convolution": _odd_window,
}  # fmt: skip
_MAX_STANDIN_BYTES = 256_000_000


def _eager_error(
    func: torch._ops.OpOverload, meta_args: Sequence[Any], meta_kwargs: dict[str, Any]
) -> Exception | None:
    """What eager torch raises for these shapes and dtypes, or None.

    The CPU kernel is called on zeros, or on ones for floating-point tensors, which may be weights.
    Meta kernels often check in another order and with other messages, but users and their tests
    rely on the messages of the real kernels.
    """
    if func.namespace != "aten":  # not torch's: the meta kernel itself decides
        return None
    total = 0

    def to_cpu(t: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += t.numel() * t.dtype.itemsize
        if t.dtype.is_floating_point and total <= _MAX_STANDIN_BYTES:
            return torch.ones_like(t, device="cpu")
        return torch.zeros_like(t, device="cpu" if total <= _MAX_STANDIN_BYTES else "meta")

    args = [map_tensors(a, to_cpu) for a in meta_args]
    kwargs = {name: map_tensors(a, to_cpu) for name, a in meta_kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if total > _MAX_STANDIN_BYTES:
        return None
    # The user's random stream must not advance.
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            func(*args, **kwargs)
        except NotImplementedError:
            # No CPU kernel for this operation or dtype; the device may support it all the same.
            return None
        except Exception as error:
            return error
    return None


def _corrected(func: torch._ops.OpOverload, result: Any, given: dict[str, Any]) -> Any:
    """The meta kernel's result, corrected where torch's real kernels return another one."""
    if "output_mask" in given:
        # Some meta kernels return every result; the real ones return None where the mask is False.
        return tuple(r if asked else None for r, asked in zip(result, given["output_mask"]))
    if (
        "batch_norm" in func._schema.name
        and not given.get("training", "no_training" not in func._schema.name)
        and len(result) >= 3
    ):
        # Outside of training nothing is saved for the backward, but the meta kernels return one
        # value per channel.
        return (result[0], result[1].new_empty(0), result[2].new_empty(0), *result[3:])
    return result


def without_placement(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a lowering receives: those that do not say where results go."""
    return {
        name: a
        for name, a in kwargs.items()
        if name not in _PLACEMENT_KEYWORDS and name != "device"
    }


def flatten(result: Any) -> tuple[tuple[Spec, ...], tuple[int | None, ...] | None, bool]:
    """The structure of a result.

    Returns:
        The specs of its tensors; `Entry.structure`, None if the result is one tensor; and whether
        it is a list.
    """
    if isinstance(result, torch.Tensor):
        return (Spec.from_tensor(result),), None, False
    specs: list[Spec] = []
    structure: list[int | None] = []
    for x in result:
        if x is None:
            structure.append(None)
        else:
            structure.append(len(specs))
            specs.append(Spec.from_tensor(x))
    return tuple(specs), tuple(structure), isinstance(result, list)
