"""One FSDP unit: a module that gathers its sharded parameters for forward, and again for backward.

A unit's parameters are those of its module's subtree, without the units inside. During the module's
forward, each parameter is replaced by its whole value: a pending value with a sharding constraint,
for which the partitioner emits an all-gather. From forward to backward its shards are kept
(`regather`). Gradients are reduce-scattered (`program.batch_sums`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.marks.marking import mark_sharding, marked_gradient
from spmd_core.modules.checkpointing import barrier, in_backward, inner_forward
from spmd_core.modules.regather import Regather, outer_hooks
from spmd_core.recording.recomputation import awaited
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpecLike
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class UnitAxes:
    """The mesh axes of a unit, by index.

    Attributes:
        mesh: the mesh.
        axis: the axis that splits parameters.
        batch_axes: the axes that split the batch, the major one first; `axis` is the last.
    """

    mesh: Mesh
    axis: int
    batch_axes: tuple[int, ...]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a unit; None leaves a dtype as it is.

    Attributes:
        param_dtype: of gathered parameters.
        reduce_dtype: in which gradients are summed over devices.
        output_dtype: of the floating-point tensors that the unit returns.
        cast_forward_inputs: whether floating-point inputs are converted to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class _GatherPlan:
    """How one parameter is gathered, and where its gradient goes.

    Attributes:
        mesh: the mesh.
        sharded: the spec of the shards.
        whole: the spec of the gathered parameter, which the unit's axis does not split.
        dtype: of the gathered parameter; None for the parameter's own.
        sharding: `sharded` over the mesh, which the gradient gets too.
        batch_axes: the axes that split the batch that the gradient sums over.
        reduce_dtype: the dtype in which the gradient is summed over devices; None for its own.
    """

    mesh: Mesh
    sharded: PartitionSpecLike
    whole: PartitionSpecLike
    dtype: torch.dtype | None
    sharding: Sharding
    batch_axes: tuple[int, ...]
    reduce_dtype: torch.dtype | None


@lru_cache(maxsize=4096)
def _plan(sharding: Sharding, layout: UnitAxes, precision: Precision) -> _GatherPlan | None:
    """How to gather a parameter; None if it is used as it is.

    A parameter that the unit's axis does not split, such as the bias behind a sum over `tensor`,
    is whole already; `param_dtype` is that of all of a unit's parameters.
    """
    is_split = any(layout.axis in axes for axes in sharding.dims)
    if sharding.mesh != layout.mesh or not (is_split or precision.param_dtype):
        return None
    sharded = tuple(axes or None for axes in sharding.dims)
    whole = tuple(
        tuple(axis for axis in axes if axis != layout.axis) or None for axes in sharding.dims
    )
    return _GatherPlan(
        layout.mesh,
        sharded,
        whole,
        precision.param_dtype,
        sharding,
        layout.batch_axes,
        precision.reduce_dtype,
    )


def _gathered(shard: torch.Tensor, plan: _GatherPlan) -> XLAShardedTensor:
    """The whole parameter as a new value. Not differentiable.

    It is converted before it is gathered, so that the gather moves `param_dtype`.
    """
    with torch.no_grad():
        value = shard if plan.dtype is None or plan.dtype == shard.dtype else shard.to(plan.dtype)
        if value.sharding is None:  # type: ignore[attr-defined]
            # Without this constraint the partitioner could, because of the one below, move the
            # gather before the conversion, or before a barrier.
            mark_sharding(value, plan.mesh, plan.sharded)
        return mark_sharding(value.clone(), plan.mesh, plan.whole)


class _Gather(torch.autograd.Function):
    """A parameter's whole value. The transpose: each device's shard of the gradient's sum."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, plan: _GatherPlan) -> torch.Tensor:
        ctx.plan, ctx.dtype = plan, parameter.dtype
        return _gathered(parameter, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, gradient = ctx.plan, grads[0]
        # With create_graph=True, the gradient has to be made of operations that autograd records.
        if not torch.is_grad_enabled():
            gradient = gradient.to(plan.reduce_dtype or gradient.dtype)
            gradient = marked_gradient(gradient, plan.sharding, plan.batch_axes)
        gradient = gradient.clone() if gradient.dtype == ctx.dtype else gradient.to(ctx.dtype)
        return mark_sharding(gradient, plan.mesh, plan.sharded), None


class _Substitute(torch.autograd.Function):
    """The value of another tensor, whose gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        return shard.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _gathered_parameter(
    parameter: torch.Tensor, shard: torch.Tensor, plan: _GatherPlan
) -> XLAShardedTensor:
    """The whole parameter, gathered from `shard`; its gradient goes to `parameter`."""
    source = parameter if shard is parameter else _Substitute.apply(parameter, shard)
    result: XLAShardedTensor = _Gather.apply(source, plan)
    return result


@dataclass(frozen=True)
class ParameterRef:
    """A module's reference to a parameter, by name."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def parameter_refs(root: nn.Module) -> Iterator[ParameterRef]:
    """The references to a unit's parameters: in its subtree, without the units inside.

    A tied parameter has several references.
    """
    stack, seen = [root], {root}
    while stack:
        module = stack.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield ParameterRef(module, name, parameter)
        for child in module._modules.values():
            if child is not None and child not in seen and unit_of(child) is None:
                seen.add(child)
                stack.append(child)


class Unit:
    """Replaces the `forward` of a module whose parameters are sharded.

    Attributes:
        module: the module.
        layout: mesh and axes.
        precision: dtypes.
        reshard_after_forward: whether the gathered parameters are dropped after forward and
            gathered again in backward.
        shard_output: `shard_output(output)` marks the result, in place.
        inner: computes the result: an earlier replacement of `forward`, or None for the method of
            the module's class.
        inside_checkpoint: whether the module is checkpointed, so that this runs again in backward.
    """

    gathers = True

    def __init__(
        self,
        module: nn.Module,
        layout: UnitAxes,
        precision: Precision,
        *,
        reshard_after_forward: bool,
        shard_output: Callable[[Any], None],
    ) -> None:
        self.module, self.layout, self.precision = module, layout, precision
        self.reshard_after_forward, self.shard_output = reshard_after_forward, shard_output
        self.inner: Callable[..., Any] | None = None
        self.inside_checkpoint = False
        # Trainers read the parameters of `module.forward` to choose the columns of a data set.
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._converted_inputs(args, kwargs)
        refs = [
            (ref, plan)
            for ref in parameter_refs(self.module)
            if (plan := self._plan_of(ref.parameter)) is not None
        ]
        parameters = {id(ref.parameter): (ref.parameter, plan) for ref, plan in refs}
        if in_backward():
            # A checkpoint's recomputation, which must not share its gathers with the first run, nor
            # gather before the gradient that it waits for.
            own = [p for p, _ in parameters.values()]
            shards = barrier([*own, *awaited()])[: len(own)] if own else []
        else:
            shards = [p for p, _ in parameters.values()]
        whole = {
            key: _gathered_parameter(p, shard, plan)
            for (key, (p, plan)), shard in zip(parameters.items(), shards)
        }
        keeps_gathered = (
            not self.reshard_after_forward or self.inside_checkpoint or not torch.is_grad_enabled()
        )
        # The backward of a checkpoint's recomputation follows at once, so it may keep the gathered
        # parameters. With saved-tensor hooks from outside, it must save what the first run saved.
        keeps_gathered = keeps_gathered or (in_backward() and outer_hooks() is None)
        regather = None
        if not keeps_gathered:
            regather = Regather(
                [p for p, _ in parameters.values()],
                [partial(_gathered, plan=plan) for _, plan in parameters.values()],
                list(whole.values()),
            )
        with (
            swapped([(ref, whole[id(ref.parameter)]) for ref, _ in refs]),
            nullcontext() if regather is None else regather.saving_recipes(),
        ):
            output = inner_forward(self.module, self.inner)(*args, **kwargs)
        output = self._converted(output, self.precision.output_dtype)
        self.shard_output(output)
        return output if regather is None else regather.before_backward(output)

    def _plan_of(self, parameter: torch.Tensor) -> _GatherPlan | None:
        sharding = parameter.sharding if isinstance(parameter, XLAShardedTensor) else None
        return None if sharding is None else _plan(sharding, self.layout, self.precision)

    def _converted_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.precision.param_dtype if self.precision.cast_forward_inputs else None
        return self._converted(args, dtype), self._converted(kwargs, dtype)

    @staticmethod
    def _converted(tree: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return tree
        return pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
            tree,
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose root a module is, or None."""
    own = module.__dict__.get("forward")
    inner = getattr(own, "inner", None)
    return own if isinstance(own, Unit) else inner if isinstance(inner, Unit) else None


@contextmanager
def swapped(pairs: list[tuple[ParameterRef, torch.Tensor]]) -> Iterator[None]:
    """Inside, the modules refer to other tensors, such as gathered parameters."""
    whole_of = {id(ref.parameter): whole for ref, whole in pairs}
    recurrent = {
        id(ref.module): ref.module for ref, _ in pairs if isinstance(ref.module, nn.RNNBase)
    }
    # A recurrent module reads its parameters from a list of its own.
    before = [(module, module._flat_weights) for module in recurrent.values()]
    try:
        for ref, whole in pairs:
            ref.module._parameters[ref.name] = whole  # type: ignore[assignment]
        for module, weights in before:
            module.__dict__["_flat_weights"] = [whole_of.get(id(w), w) for w in weights]
        yield
    finally:
        for ref, _ in pairs:
            ref.module._parameters[ref.name] = ref.parameter
        for module, weights in before:
            module.__dict__["_flat_weights"] = weights
