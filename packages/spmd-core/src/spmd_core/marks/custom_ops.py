"""Marks as operators of torch's dispatcher, in the namespace `xla`: with strings in place of objects, they pass through traces of a program.

They do on device `xla` what `marking` does; of other tensors they return a copy. Traced with fake tensors they stay in the graph as they are.
"""

import ast
from collections.abc import Sequence
from typing import Any

import torch

from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.marks.marking import mark_sharding
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpec
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_library = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec) -> Tensor"
)
_library.define("aot_mark_sharding(Tensor input, str mesh, str partition_spec) -> Tensor")
_library.define("dynamo_set_buffer_donor_(Tensor(a) t, bool should_donate) -> Tensor(a)")


def parse_partition_spec(text: str) -> PartitionSpec:
    """The partition spec that a string is the literal of, such as `"('data', None)"`.

    Raises:
        PartitionSpecError: the string is not the literal of a tuple or a list.

    Example:
        >>> parse_partition_spec("('data', (0, 1), None)")
        ('data', (0, 1), None)
    """
    try:
        spec = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        spec = None
    if not isinstance(spec, (tuple, list)):
        raise PartitionSpecError(
            f"a partition spec is read from the literal of a tuple; got {text!r}. Pass str(partition_spec), such as \"('data', None)\"."
        )
    return tuple(spec)


def parse_axis_names(text: str) -> tuple[str, ...] | None:
    """The names of a mesh's axes that a string is the literal of, such as `"('data', 'model')"`; None for `"None"` and for the empty string.

    Raises:
        MeshError: the string is neither.
    """
    if text.strip() in ("", "None"):
        return None
    try:
        names = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        names = None
    if not isinstance(names, (tuple, list)):
        raise MeshError(
            f"axis names are read from the literal of a tuple, or None; got {text!r}. Pass their str(), such as \"('data', 'model')\"."
        )
    return tuple(names)


def _mark_in_place(
    input: torch.Tensor,
    device_ids: Sequence[int],
    mesh_shape: Sequence[int],
    axis_names: str,
    partition_spec: str,
) -> torch.Tensor:
    """`mark_sharding` of the tensor itself, which is returned; its gradient follows."""
    mesh, spec = (
        Mesh(device_ids, tuple(mesh_shape), parse_axis_names(axis_names)),
        parse_partition_spec(partition_spec),
    )
    if isinstance(input, XLAShardedTensor):
        return mark_sharding(input, mesh, spec)
    # Compiled code takes what an operator without an alias in its schema returns for a new tensor.
    return input.clone()


def _marked_copy(input: torch.Tensor, mesh: str, partition_spec: str) -> torch.Tensor:
    """A new tensor with the same values, marked; its gradient follows, and the input's sharding stays."""
    parsed, spec = Mesh.from_str(mesh), parse_partition_spec(partition_spec)
    copied = input.clone()
    return mark_sharding(copied, parsed, spec) if isinstance(copied, XLAShardedTensor) else copied


class _PassThrough(torch.autograd.Function):
    """A mark in a trace: the same operator on the gradient."""

    @staticmethod
    def forward(ctx: Any, overload: Any, input: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.overload, ctx.how = overload, how
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = overload(input, *how)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, ctx.overload(grads[0], *ctx.how), *(None for _ in ctx.how))


def _install(name: str, kernel: Any) -> None:
    overload = getattr(torch.ops.xla, name).default

    def with_autograd(input: torch.Tensor, *how: Any) -> Any:
        # On the device autograd sees the mark's own hook, and a clone where there is one.
        return (
            kernel(input, *how)
            if isinstance(input, XLAShardedTensor)
            else _PassThrough.apply(overload, input, *how)
        )

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(
        f"xla::{name}", lambda input, *how: torch.empty_like(input), lib=_library
    )


_install("dynamo_mark_sharding", _mark_in_place)
_install("aot_mark_sharding", _marked_copy)


def _set_buffer_donor(t: torch.Tensor, should_donate: bool) -> torch.Tensor:
    """Returns the tensor and changes nothing, whichever way it is asked.

    A buffer is donated to its successor as soon as no tensor holds its value, so True asks for what happens anyway. It never is while a tensor
    holds it, so what False protects, the tensor's value, is always protected.
    """
    return t


_library.impl("dynamo_set_buffer_donor_", _set_buffer_donor, "CompositeImplicitAutograd")
