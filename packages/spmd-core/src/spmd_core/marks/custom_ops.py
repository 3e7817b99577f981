"""Marks as operators of torch's dispatcher, in the namespace `xla`, for use in traced programs.

Their arguments are strings in place of objects. On device `xla` they do the same as
`marks.marking`; for other tensors they return a copy. Traced with fake tensors, they stay in the
graph.
"""

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from spmd_core.errors import MeshError, PartitionSpecError
from spmd_core.marks.marking import mark_sharding
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpecLike, ShardingSpec
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_library = torch.library.Library("xla", "FRAGMENT")
# By qualified name, the functions that `traced_mark` calls.
# Guarded by: imports. Cleared by: never.
traced_functions: dict[str, Callable[..., torch.Tensor]] = {}
_library.define(
    "dynamo_mark_sharding(Tensor input, "
    "int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec) -> Tensor"
)
_library.define("aot_mark_sharding(Tensor input, str mesh, str partition_spec) -> Tensor")
_library.define("traced_mark(Tensor input, str function, str arguments) -> Tensor")
_library.define("dynamo_set_buffer_donor_(Tensor(a) t, bool should_donate) -> Tensor(a)")


def parse_partition_spec(text: str) -> PartitionSpecLike:
    """Parses the literal of a partition spec, such as `"('data', None)"`.

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
            f"a partition spec is read from the literal of a tuple; got {text!r}. "
            "Pass str(partition_spec), such as \"('data', None)\"."
        )
    return tuple(spec)


def parse_axis_names(text: str) -> tuple[str, ...] | None:
    """Parses the literal of axis names, such as `"('data', 'model')"`.

    Returns:
        The names; None for `"None"` and for the empty string.

    Raises:
        MeshError: the string is neither the literal of a tuple or a list, nor None, nor empty.
    """
    if text.strip() in ("", "None"):
        return None
    try:
        names = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        names = None
    if not isinstance(names, (tuple, list)):
        raise MeshError(
            f"axis names are read from the literal of a tuple, or None; got {text!r}. "
            "Pass their str(), such as \"('data', 'model')\"."
        )
    return tuple(names)


def _mark_in_place(
    input: torch.Tensor,
    device_ids: Sequence[int],
    mesh_shape: Sequence[int],
    axis_names: str,
    partition_spec: str,
) -> torch.Tensor:
    """Marks the tensor itself, and returns it; its gradient gets the same sharding."""
    mesh, spec = (
        Mesh(device_ids, tuple(mesh_shape), parse_axis_names(axis_names)),
        parse_partition_spec(partition_spec),
    )
    if isinstance(input, XLAShardedTensor):
        return mark_sharding(input, mesh, spec)
    # Compiled code assumes a new tensor from an operator without an alias in its schema.
    return input.clone()


def _marked_copy(input: torch.Tensor, mesh: str, partition_spec: str) -> torch.Tensor:
    """A marked copy; its gradient gets the same sharding, and the input keeps its own."""
    parsed, spec = Mesh.from_str(mesh), parse_partition_spec(partition_spec)
    copied = input.clone()
    return mark_sharding(copied, parsed, spec) if isinstance(copied, XLAShardedTensor) else copied


class _PassThrough(torch.autograd.Function):
    """A mark in a trace; its backward applies the same operator to the gradient."""

    @staticmethod
    def forward(
        ctx: Any, overload: torch._ops.OpOverload, input: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        ctx.overload, ctx.arguments = overload, arguments
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = overload(input, *arguments)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, ctx.overload(grads[0], *ctx.arguments), *(None for _ in ctx.arguments))


def _traced(input: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """What a trace has for a marked tensor."""
    return torch.empty_like(input)


def _install(name: str, kernel: Callable[..., torch.Tensor]) -> None:
    overload = getattr(torch.ops.xla, name).default

    def with_autograd(input: torch.Tensor, *arguments: Any) -> torch.Tensor:
        # On the device autograd sees the hook that a mark sets, and the clone of a marked copy.
        return (
            kernel(input, *arguments)
            if isinstance(input, XLAShardedTensor)
            else _PassThrough.apply(overload, input, *arguments)
        )

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, with_autograd, "Autograd")
    # Not register_fake, which looks for its caller in the files of all modules: 40 ms at import.
    _library.impl(name, _traced, "Meta")


_install("dynamo_mark_sharding", _mark_in_place)
_install("aot_mark_sharding", _marked_copy)


def _call_traced(input: torch.Tensor, function: str, arguments: str) -> torch.Tensor:
    """Calls a function of `traced_functions` as a traced program did."""
    args, kwargs = _read_arguments(arguments)
    return traced_functions[function](input, *args, **kwargs)


@lru_cache(maxsize=1024)
def _read_arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = ast.literal_eval(text)
    return tuple(map(_revived, args)), {name: _revived(a) for name, a in kwargs.items()}


def _revived(literal: Any) -> Any:
    """The mesh or the `ShardingSpec` of a literal; others as they are."""
    if isinstance(literal, dict) and "device_ids" in literal:
        return Mesh(**literal)
    if isinstance(literal, dict) and "minibatch" in literal:
        return ShardingSpec(**{name: _revived(value) for name, value in literal.items()})
    return literal


_install("traced_mark", _call_traced)
# They mark their argument, whose users are then other operations than the result's.
IN_PLACE = (torch.ops.xla.traced_mark, torch.ops.xla.dynamo_mark_sharding)
for _packet in IN_PLACE:
    torch.fx.node.has_side_effect(_packet.default)


def _set_buffer_donor(t: torch.Tensor, should_donate: bool) -> torch.Tensor:
    """Returns the tensor; `should_donate` has no effect.

    A buffer is donated as soon as no tensor holds its value, so True asks for what happens anyway.
    A buffer that a tensor holds is never donated, so the value that False protects is always safe.
    """
    return t


_library.impl("dynamo_set_buffer_donor_", _set_buffer_donor, "CompositeImplicitAutograd")
