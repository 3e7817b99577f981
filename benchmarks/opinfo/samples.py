"""The entries of torch's operator database that can be compared, and their samples on a device."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import spmd_core as spmd

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
DTYPES_BY_NAME = {str(d).removeprefix("torch."): d for d in DTYPES}
VARIANTS = ("forward", "gradient", "in_place", "out", "view_write", "errors")

# Why an entry cannot be compared, by its full name, or by the prefix before the star.
EXCLUDED = {
    "sparse*": "sparse layout",
    "to_sparse": "sparse layout",
    "jiterator*": "compiles CUDA source",
    "torch_ops_aten__flash_attention_forward": "a CUDA kernel's own entry",
    "torch_ops_aten__efficient_attention_forward": "a CUDA kernel's own entry",
    "empty*": "returns uninitialised memory",
    "new_empty*": "returns uninitialised memory",
    "chalf": "complex32, which XLA does not have",
}

# Entries whose index arguments torch wants on the CPU, whatever the device of the input.
ARGUMENTS_ON_CPU = {"tensor_split"}
_STATISTICS = (
    "eager torch's CPU kernel rounds the saved statistics to 16 bits; its meta kernels and other "
    "devices keep float32, and so do we"
)
# Why an entry cannot be compared in the 16-bit float dtypes.
EXCLUDED_OF_SIXTEEN_BITS = {
    "native_batch_norm": _STATISTICS,
    "_native_batch_norm_legit": _STATISTICS,
    "_batch_norm_with_update": _STATISTICS,
    "native_layer_norm": _STATISTICS,
    **dict.fromkeys(
        ("complex", "view_as_complex"), "of two float16 makes complex32, which XLA does not have"
    ),
    "nn_functional_linear_cross_entropy_chunked_none": (
        "torch's own code accumulates in float32 on a CPU, in 16 bits on a device it does not know"
    ),
}


@dataclass(frozen=True)
class Sample:
    """The arguments of one call of an entry, with tensors on the CPU."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    moves_args: bool = True  # False where torch wants the arguments on the CPU on any device

    def tensors(self) -> list[torch.Tensor]:
        return [
            t
            for t in pytree.tree_leaves((self.input, self.args, self.kwargs))
            if isinstance(t, torch.Tensor)
        ]


def entries() -> list[Any]:
    """torch's operator database."""
    return list(op_db)


def names() -> list[str]:
    """The entries' names, full and short."""
    return [name for op in op_db for name in dict.fromkeys((op.formatted_name, op.name))]


def matching(patterns: str) -> list[Any]:
    """The entries whose name, full or short, matches one of the patterns, separated by commas."""
    return [
        op
        for op in op_db
        if any(
            fnmatch.fnmatch(name, p)
            for p in patterns.split(",")
            for name in (op.formatted_name, op.name)
        )
    ]


def excluded(name: str, dtype: torch.dtype) -> str | None:
    """Why an entry is excluded for a dtype, or None."""
    if dtype in (torch.float16, torch.bfloat16) and name in EXCLUDED_OF_SIXTEEN_BITS:
        return EXCLUDED_OF_SIXTEEN_BITS[name]
    for pattern, reason in EXCLUDED.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return reason
    return None


def applies(op: Any, variant: str, dtype: torch.dtype) -> bool:
    """Whether torch declares that the entry has this variant for this dtype on the CPU."""
    if variant == "errors":
        return op.error_inputs_func is not None and dtype is torch.float32
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if variant == "gradient":
        return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    if variant == "in_place":
        return op.inplace_variant is not None
    return variant != "out" or bool(op.supports_out)


def _spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly spread over all of them; all items for a limit of 0."""
    if limit <= 0 or len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(limit - 1, 1))] for i in range(limit)]


def is_plain(t: torch.Tensor) -> bool:
    return (
        t.layout is torch.strided
        and not t.is_quantized
        and not t.is_nested
        and t.device.type == "cpu"
    )


def _undefined(name: str, s: Sample) -> bool:
    """Whether eager torch's result is undefined, so that it cannot serve as a reference."""
    if name == "nonzero_static":
        return s.input.numel() == 0  # the result's memory stays uninitialised
    draws = s.kwargs.get("_random_samples")
    # Draws outside of [0, 1) place windows outside of the input.
    return draws is not None and bool(((draws < 0) | (draws >= 1)).any())


def samples(op: Any, dtype: torch.dtype, *, requires_grad: bool, limit: int) -> list[Sample]:
    """The samples that torch defines for the entry and dtype, the same ones at every call."""
    torch.manual_seed(0)
    moves = op.name not in ARGUMENTS_ON_CPU
    found = [
        Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad, moves)
        for s in op.sample_inputs("cpu", dtype, requires_grad)
    ]
    return _spread(
        [
            s
            for s in found
            if all(is_plain(t) for t in s.tensors()) and not _undefined(op.formatted_name, s)
        ],
        limit,
    )


def _is_cpu(x: Any) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x == "cpu")


def moved(
    sample: Sample, device: str, *, dtype: torch.dtype | None = None, mesh: spmd.Mesh | None = None
) -> Sample:
    """A copy of a sample on a device.

    Args:
        sample: stays as it is.
        device: where the tensors of the copy are.
        dtype: converts floating-point tensors to this dtype, complex ones to its complex form.
        mesh: splits the first tensor with dims along its longest dim, over the mesh's first axis.
    """
    marked = False

    def move(x: Any) -> Any:
        nonlocal marked
        if isinstance(x, torch.Tensor):
            y = x.detach().clone()
            if dtype is not None:
                y = (
                    y.to(dtype.to_complex() if y.is_complex() else dtype)
                    if y.is_complex() or y.is_floating_point()
                    else y
                )
            y = y.to(device)
            if mesh is not None and not marked and y.dim():
                longest = max(range(y.dim()), key=lambda d: y.shape[d])
                spmd.mark_sharding(
                    y, mesh, tuple(0 if d == longest else None for d in range(y.dim()))
                )
                marked = True
            return y.requires_grad_(x.requires_grad)
        if device != "cpu" and _is_cpu(x):
            return device
        return x

    input_ = pytree.tree_map(move, sample.input)
    args, kwargs = (
        pytree.tree_map(move, (sample.args, sample.kwargs))
        if sample.moves_args
        else (sample.args, dict(sample.kwargs))
    )
    if (
        dtype is not None
        and isinstance(kwargs.get("dtype"), torch.dtype)
        and kwargs["dtype"].is_floating_point
    ):
        kwargs["dtype"] = dtype
    return Sample(input_, args, kwargs, sample.process, sample.moves_args)
