"""Shapes, strides and dtypes of an operation's results, from torch's own meta kernels; the caller memoises, so this runs once per distinct call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd_core.graph import Spec

# Where the results go is no business of shape inference, nor of a lowering.
_PLACEMENT_KEYWORDS = ("layout", "pin_memory", "generator", "non_blocking")


def meta_like(spec: Spec) -> torch.Tensor:
    """A meta tensor of this spec; the offset stays out, as a view's offset adds to its base's."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies `function` to the tensors of an argument: itself, or elements of a list or tuple."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return [map_tensors(x, function) for x in tree]
    return tree


def infer(func: Any, args: Sequence[Any], kwargs: dict[str, Any], spec_of: Callable[[torch.Tensor], Spec]) -> Any:
    """What `func` returns for these arguments, with meta tensors in the place of tensors. Raises what torch raises for bad arguments."""
    metas: dict[int, torch.Tensor] = {}

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in metas:
            metas[id(t)] = meta_like(spec_of(t))
        return metas[id(t)]

    meta_args = [map_tensors(a, to_meta) for a in args]
    meta_kwargs = {name: map_tensors(a, to_meta) for name, a in kwargs.items() if name != "pin_memory"}
    if "generator" in meta_kwargs:
        meta_kwargs["generator"] = None  # no randomness here, and a generator of another device would be refused
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    with torch.no_grad():
        result = func(*meta_args, **meta_kwargs)
    names = [a.name for a in func._schema.arguments]
    if "output_mask" in names:
        # Some meta kernels make every result; the real ones leave out what the mask does not ask for.
        mask = {**dict(zip(names, args)), **kwargs}["output_mask"]
        result = tuple(r if asked else None for r, asked in zip(result, mask))
    return result


def without_placement(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a lowering is given."""
    return {name: a for name, a in kwargs.items() if name not in _PLACEMENT_KEYWORDS and name != "device"}


def flatten(result: Any) -> tuple[tuple[Spec, ...], tuple[int | None, ...] | None, bool]:
    """Specs of the tensors in a result, how they are arranged (None: the result is one tensor), and whether in a list."""
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
