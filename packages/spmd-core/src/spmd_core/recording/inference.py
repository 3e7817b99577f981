"""Infers shapes, strides and dtypes of an operation's results, by torch's own meta kernels.

The caller memoises the results: this runs once for each distinct call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core import dtypes
from spmd_core.graph.values import Spec
from spmd_core.recording import cpu_kernels, schema
from spmd_core.recording.layouts import require_strided
from spmd_core.tensor.logical_device import require_logical


def meta_like(spec: Spec) -> torch.Tensor:
    """A meta tensor of this spec, at the beginning of its storage."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def require_dtype(dtype: torch.dtype) -> None:
    """Raises torch's error for a missing kernel if the device lacks the dtype.

    Python's operators hide a TypeError.
    """
    try:
        dtypes.to_jax(dtype)
    except TypeError as error:
        raise NotImplementedError(str(error)) from None


def _require_dtypes(args: Sequence[Any]) -> None:
    """Of a call that fails: says so if a tensor of the host has a dtype that the device lacks."""

    def check(t: torch.Tensor) -> None:
        require_dtype(t.dtype)

    for a in args:
        map_tensors(a, check)


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
        meta: replaces the meta kernel, if torch has none, or one whose checks hold for another
            device only.
    """
    require_strided(kwargs.get("layout"), func.name(), kwargs.get("dtype"))
    if kwargs.get("dtype") is not None:
        require_dtype(kwargs["dtype"])
    metas: dict[int, torch.Tensor] = {}

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in metas:
            with torch._C._DisableTorchDispatch():
                metas[id(t)] = meta_like(spec_of(t))
        return metas[id(t)]

    meta_args = [map_tensors(a, to_meta) for a in args]
    meta_kwargs = {
        name: map_tensors(a, to_meta) for name, a in kwargs.items() if name != "pin_memory"
    }
    if "generator" in meta_kwargs:
        # Meta kernels draw nothing, and torch refuses a generator of another device.
        meta_kwargs["generator"] = None
    if meta_kwargs.get("device") is not None:
        require_logical(meta_kwargs["device"])
        meta_kwargs["device"] = torch.device("meta")
    try:
        # An active mode, such as that of a selective checkpoint, would see what runs here as
        # operations of the program.
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            result = (meta or func)(*meta_args, **meta_kwargs)
    except NotImplementedError:  # there is no meta kernel; the call may be right
        _require_dtypes(args)
        cpu_kernels.refuse(func, args, kwargs)
        raise
    except Exception:
        answer = cpu_kernels.ask(func, args, kwargs, is_refused=True)
        if answer.error is not None:
            _require_dtypes(args)
            raise cpu_kernels.again(answer.error) from None
        if meta is not None or answer.results is None or answer.metas is not None:
            raise
        result = _as_metas(answer.results)  # some meta kernels refuse what the real ones accept
    answer = cpu_kernels.ask(func, args, kwargs, result)
    if answer.error is not None:
        _require_dtypes(args)
        raise cpu_kernels.again(answer.error)
    given = schema.of(func).by_name(args, kwargs)
    result = _corrected(func, result, given)
    facts = schema.of(func)
    writes_in_place = facts.written and not facts.out_names
    return result if writes_in_place else cpu_kernels.corrected(func, result, answer)


def _as_metas(specs: Any) -> Any:
    """Meta tensors of nested specs; None stays."""
    if isinstance(specs, tuple):
        return tuple(_as_metas(spec) for spec in specs)
    return None if specs is None else meta_like(specs)


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
        # In evaluation nothing is saved for the backward, but the meta kernels return one value per
        # channel.
        return (result[0], result[1].new_empty(0), result[2].new_empty(0), *result[3:])
    return result


def without_placement(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A lowering's keyword arguments: all but those that say where results are stored."""
    return {name: a for name, a in kwargs.items() if name not in cpu_kernels.PLACEMENT_KEYWORDS}


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
