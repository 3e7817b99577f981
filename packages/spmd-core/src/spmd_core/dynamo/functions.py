"""Functions of this package as Dynamo traces them: marks are operations of its graph.

Dynamo traces the Python code of what a compiled function calls. The code of this package records
operations and must not be traced: it is left out, and the functions that a model calls have a form
here for Dynamo. This is the one file of the package that Dynamo traces.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from spmd_core.marks import custom_ops, marking
from spmd_core.modules.document_attention import document_attention
from spmd_core.modules.linear_cross_entropy import linear_cross_entropy
from spmd_core.sharding import mesh as meshes
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import ShardingSpec
from spmd_core.torch_backend import registration
from spmd_core.torch_backend.after_import import after_import


def trace_as_mark(function: Callable[..., Any], *, in_place: bool = True) -> None:
    """Makes Dynamo put calls of a function into its graph, as `torch.ops.xla.traced_mark`.

    Args:
        function: of a tensor, and of meshes, partition specs and other literals; returns a tensor.
        in_place: whether it returns the tensor itself, unless `inplace=False` is among the
            arguments, or a `ShardingSpec` of a process's part.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    custom_ops.traced_functions[name] = function

    def traced(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        marked: torch.Tensor = torch.ops.xla.traced_mark(t, name, _literal((args, kwargs)))
        is_new = not in_place or kwargs.get("inplace") is False
        for given in (*args, *kwargs.values()):
            is_new = is_new or (isinstance(given, ShardingSpec) and given.minibatch)
        return marked if is_new else t

    _trace_as(function, traced)


def trace_as_call(function: Callable[..., Any]) -> None:
    """Makes Dynamo put calls of a function into its graph as they are.

    Args:
        function: of tensors and constants; takes fake tensors, too.
    """

    def change(module: ModuleType) -> None:
        torch.compiler.allow_in_graph(function)

    after_import("torch._dynamo", change)


def trace_as_constant(function: Callable[..., Any]) -> None:
    """Makes Dynamo call a function of constants as it traces, and use what it returns."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{function.__qualname__} takes constants in a compiled function")

    _trace_as(function, traced, folds=True)


def trace_as_global_mesh(function: Callable[[], Any]) -> None:
    """Makes Dynamo read the global mesh, and guard on it, where a function returns it."""
    _trace_as(function, lambda: meshes._global_mesh)


def _literal(value: Any) -> str:
    """The text from which `custom_ops` reads an argument of a mark."""
    if isinstance(value, Mesh):
        return value.text
    if isinstance(value, ShardingSpec):
        spec = _literal(value.partition_spec)
        return (
            f"{{'mesh': {value.mesh.text}, 'partition_spec': {spec}, "
            f"'minibatch': {value.minibatch!r}}}"
        )
    if isinstance(value, dict):
        return "{" + "".join([f"{key!r}: {_literal(x)}, " for key, x in value.items()]) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + "".join([f"{_literal(x)}, " for x in value]) + ")"
    return repr(value)


def _trace_as(
    function: Callable[..., Any], traced: Callable[..., Any], *, folds: bool = False
) -> None:
    def change(module: ModuleType) -> None:
        torch.compiler.substitute_in_graph(
            function, can_constant_fold_through=folds, skip_signature_check=True
        )(traced)

    after_import("torch._dynamo", change)


def install() -> None:
    """Registers the forms of functions once Dynamo is imported."""
    for function in (marking.mark_sharding, marking.constrain, marking.clear_sharding):
        trace_as_mark(function)
    for whole in (document_attention, linear_cross_entropy):
        trace_as_call(whole)
    trace_as_global_mesh(meshes.get_global_mesh)
    trace_as_constant(registration.device)
