"""One unit of fully sharded data parallelism: a forward whose parameters are gathered for it, and gathered again for its backward.

A unit's parameters are those of its module's subtree, without the units inside. Around the module's forward each stands as its whole value: a pending
value with a constraint, which the partitioner makes an all-gather. What autograd would save of it is saved as a recipe instead, and made again from
the shard in backward, behind a barrier over which the compiler cannot keep the first one. Gradients come back as a reduce-scatter (`partial_sums`).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.graph.storage import Storage, lock, read
from spmd_core.graph.values import Part, Value
from spmd_core.marks.marking import mark_sharding
from spmd_core.modules.checkpointing import barrier, behind_barrier, in_backward, inner_forward
from spmd_core.modules.sharded_gradients import Scatter, reduce_scattered
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpec
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, wrap


@dataclass(frozen=True)
class Layout:
    """Over which axes of a mesh a unit lives, as indices.

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
    """The dtypes of a unit, None where they are to stay: of gathered parameters, of sums of gradients over devices, of inputs and of outputs."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class _Plan:
    """How one parameter is gathered, and where its gradient goes."""

    mesh: Mesh
    sharded: PartitionSpec
    whole: PartitionSpec
    dtype: torch.dtype | None
    scatter: Scatter | None


@lru_cache(maxsize=4096)
def _plan(sharding: Sharding, layout: Layout, precision: Precision) -> _Plan | None:
    """None for a parameter that the unit's axis does not split: it is used as it is."""
    dims = [dim for dim, axes in enumerate(sharding.dims) if layout.axis in axes]
    if sharding.mesh != layout.mesh or not dims:
        return None
    sharded = tuple(axes or None for axes in sharding.dims)
    whole = tuple(
        tuple(axis for axis in axes if axis != layout.axis) or None for axes in sharding.dims
    )
    scatter = None
    if not any(whole) and layout.axis in layout.batch_axes:
        scatter = Scatter(
            layout.mesh, layout.batch_axes, layout.axis, dims[0], precision.reduce_dtype
        )
    return _Plan(layout.mesh, sharded, whole, precision.param_dtype, scatter)


def _gathered(shard: torch.Tensor, plan: _Plan) -> XLAShardedTensor:
    """The whole parameter as a new value; converted first, so that what travels is in the dtype that is used. Not differentiable."""
    with torch.no_grad():
        value = shard if plan.dtype is None or plan.dtype == shard.dtype else shard.to(plan.dtype)
        if value.sharding is None:  # type: ignore[attr-defined]
            # Else the constraint below could move the gather before a conversion, or before a barrier.
            mark_sharding(value, plan.mesh, plan.sharded)
        return mark_sharding(value.clone(), plan.mesh, plan.whole)


class _Gather(torch.autograd.Function):
    """A parameter's whole value. Its transpose leaves each device its shard of the gradient's sum."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, plan: _Plan) -> torch.Tensor:
        ctx.plan, ctx.dtype = plan, parameter.dtype
        return _gathered(parameter, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, gradient = ctx.plan, grads[0]
        # To be differentiated again, it has to be made of operations that autograd sees.
        if plan.scatter is not None and not torch.is_grad_enabled():
            gradient = reduce_scattered(gradient, plan.scatter)
        gradient = gradient.clone() if gradient.dtype == ctx.dtype else gradient.to(ctx.dtype)
        return mark_sharding(gradient, plan.mesh, plan.sharded), None


@dataclass(frozen=True)
class _Slot:
    """A place where a module holds a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def slots(root: nn.Module) -> Iterator[_Slot]:
    """Where the parameters of a unit are held: in its subtree, without the units inside. A tied parameter has several places."""
    stack, seen = [root], {root}
    while stack:
        module = stack.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield _Slot(module, name, parameter)
        for child in module._modules.values():
            if child is not None and child not in seen and unit_of(child) is None:
                seen.add(child)
                stack.append(child)


class Unit:
    """Stands in the `forward` of a module whose parameters are sharded.

    Attributes:
        module: the module.
        layout: mesh and axes.
        precision: dtypes.
        reshard_after_forward: whether the gathered parameters are dropped after forward and gathered again in backward.
        shard_output: `shard_output(output)`, called for its effect, lays the result out.
        inner: what computes the result: an earlier stand-in of `forward`, or None for the method of the module's class.
    """

    gathers = True

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
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
        found = [
            (slot, plan)
            for slot in slots(self.module)
            if (plan := self._plan_of(slot.parameter)) is not None
        ]
        parameters = {id(slot.parameter): (slot.parameter, plan) for slot, plan in found}
        if in_backward():
            # The second run of a checkpoint. Its gathers are its own, and it runs at once, so that it may keep them.
            args, kwargs = behind_barrier((args, kwargs))
            shards = barrier([p for p, _ in parameters.values()]) if parameters else []
        else:
            shards = [p for p, _ in parameters.values()]
        whole = {
            key: _instead(p, shard, plan)
            for (key, (p, plan)), shard in zip(parameters.items(), shards)
        }
        keeps = (
            not self.reshard_after_forward or self.inside_checkpoint or not torch.is_grad_enabled()
        )
        # Without hooks from outside, a checkpoint's second run is followed by its backward at once; with them, it must save what the first saved.
        keeps = keeps or (in_backward() and _outer_hooks() is None)
        again = None if keeps else _Again(list(parameters.values()), list(whole.values()))
        with (
            _swapped([(slot, whole[id(slot.parameter)]) for slot, _ in found]),
            nullcontext() if again is None else again.recording(),
        ):
            output = inner_forward(self.module, self.inner)(*args, **kwargs)
        output = self._converted(output, self.precision.output_dtype)
        self.shard_output(output)
        return output if again is None else again.before_backward(output)

    def _plan_of(self, parameter: torch.Tensor) -> _Plan | None:
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


class _Again:
    """One forward of a unit, as its backward needs it: the shards, and what was made of the gathered parameters."""

    def __init__(
        self, parameters: list[tuple[nn.Parameter, _Plan]], whole: list[XLAShardedTensor]
    ) -> None:
        # Aliases, which another tensor in `parameter.data` does not change, and which are not the parameters, whose hooks would know them.
        self._shards = [p.data for p, _ in parameters]
        self._plans = [plan for _, plan in parameters]
        self._parameters = [p for p, _ in parameters]
        self._versions = [p._version for p, _ in parameters]
        self._sources = {read(w._handle): i for i, w in enumerate(whole)}
        self._values: list[Value] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, autograd saves recipes. What is not made of gathered parameters goes to the hooks that were there before, if any."""
        outer = _outer_hooks()
        pack_other, unpack_other = outer if outer is not None else (_same, _same)
        sources = self._sources

        def pack(saved: torch.Tensor) -> Any:
            recipe = (
                _recipe(read(saved._handle), sources, depth=8)
                if isinstance(saved, XLAShardedTensor)
                else None
            )
            return (pack_other(saved), None) if recipe is None else (recipe, saved._handle.spec)  # type: ignore[attr-defined]

        def unpack(packed: Any) -> torch.Tensor:
            what, spec = packed
            if spec is None:
                other: torch.Tensor = unpack_other(what)
                return other
            with lock:
                return wrap(Storage(_follow(what, self._gathered_again(None)[0]), spec))

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            # What is kept for backward must not keep the values of forward.
            self._sources = {}

    def before_backward(self, output: Any) -> Any:
        """Gathers again when the first gradient arrives, and makes that gradient wait for it and it for the gradient."""

        def gather(gradient: torch.Tensor) -> torch.Tensor | None:
            if (
                self._values is not None
                or not isinstance(gradient, XLAShardedTensor)
                or torch.is_grad_enabled()
            ):
                return None
            return self._gathered_again(gradient)[1]

        if self._shards:
            for leaf in pytree.tree_leaves(output):
                if (
                    isinstance(leaf, torch.Tensor)
                    and leaf.requires_grad
                    and leaf.grad_fn is not None
                ):
                    leaf.register_hook(gather)
        return output

    def _gathered_again(
        self, gradient: torch.Tensor | None
    ) -> tuple[list[Value], torch.Tensor | None]:
        if self._values is not None:
            return self._values, None
        for parameter, version in zip(self._parameters, self._versions):
            if parameter._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a parameter of shape "
                    f"{tuple(parameter.shape)} is at version {parameter._version}; expected version {version}, as it was in forward. "
                    "Call backward before the parameters are updated."
                )
        with torch.no_grad():
            results = barrier([*self._shards, *([] if gradient is None else [gradient])])
            whole = [_gathered(shard, plan) for shard, plan in zip(results, self._plans)]
        # Values and not tensors: what a tensor holds is a result of the program.
        values = [read(w._handle) for w in whole]
        if in_backward():
            # Until its end: a later backward gathers anew.
            self._values = values
            torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        return values, None if gradient is None else results[-1]

    def _forget(self) -> None:
        self._values = None


def _outer_hooks() -> Any:
    """The (pack, unpack) that autograd would call on a saved tensor now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _same(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _recipe(value: Value, sources: dict[Value, int], *, depth: int) -> Any:
    """How a value is made of gathered parameters alone: a number of one, or (operation, recipes of its inputs, numbers). None for other values."""
    if value in sources:
        return sources[value]
    if value.data is not None or depth == 0 or isinstance(value, Part) or not value.inputs:
        return None
    inputs = []
    for x in value.inputs:
        recipe = _recipe(x, sources, depth=depth - 1)
        if recipe is None:
            return None
        inputs.append(recipe)
    return value.entry, tuple(inputs), value.numbers


def _follow(recipe: Any, values: list[Value]) -> Value:
    if isinstance(recipe, int):
        return values[recipe]
    entry, inputs, numbers = recipe
    return Value(entry, tuple(_follow(x, values) for x in inputs), numbers)


class _Instead(torch.autograd.Function):
    """Another tensor's value in the place of a parameter, which receives the gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        return shard.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _instead(parameter: torch.Tensor, shard: torch.Tensor, plan: _Plan) -> XLAShardedTensor:
    source = parameter if shard is parameter else _Instead.apply(parameter, shard)
    result: XLAShardedTensor = _Gather.apply(source, plan)
    return result


@contextmanager
def _swapped(pairs: list[tuple[_Slot, torch.Tensor]]) -> Iterator[None]:
    """Inside, the modules hold the gathered parameters."""
    flat = {id(slot.parameter): whole for slot, whole in pairs}
    lists = {
        id(slot.module): slot.module for slot, _ in pairs if isinstance(slot.module, nn.RNNBase)
    }
    # A recurrent module reads its parameters from a list of its own.
    before = [(module, module._flat_weights) for module in lists.values()]
    try:
        for slot, whole in pairs:
            slot.module._parameters[slot.name] = whole  # type: ignore[assignment]
        for module, weights in before:
            module.__dict__["_flat_weights"] = [flat.get(id(w), w) for w in weights]
        yield
    finally:
        for slot, _ in pairs:
            slot.module._parameters[slot.name] = slot.parameter
        for module, weights in before:
            module.__dict__["_flat_weights"] = weights
