"""torch's styles of tensor parallelism as marks: of a module's parameters, inputs and results.

The styles are torch's own classes, from `torch.distributed.tensor.parallel`. A style marks the
parameters of its module, and hooks say how the axis splits what goes in and comes out, and the
gradients of both.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import require_bool
from spmd_core.errors import MeshError, PartitionSpecError, UnsupportedOpError
from spmd_core.marks import along
from spmd_core.marks.along import AxisLayout, Redistribute
from spmd_core.marks.device_mesh import AnyMesh, DeviceMesh, to_device_mesh
from spmd_core.marks.marking import mark_sharding
from spmd_core.marks.placements import placement_types
from spmd_core.modules.checkpointing import in_backward, inner_forward
from spmd_core.modules.regather import Regather, is_saved_by_others
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@dataclass(frozen=True)
class Axis:
    """The mesh axes along which a plan is applied.

    Attributes:
        mesh: the mesh.
        axes: one of its axes, or several that a dimension of a DeviceMesh flattens.
        device_mesh: the user's argument.
        reshards: whether gathered inputs are kept in shards until backward.
    """

    mesh: Mesh
    axes: tuple[int, ...]
    device_mesh: AnyMesh
    reshards: bool = True

    def layout(self, placement: Any, *, is_sum: bool = False) -> AxisLayout:
        """The layout that a placement describes.

        Raises:
            UnsupportedOpError: neither `Shard` nor `Replicate`.
        """
        types = placement_types()
        if isinstance(placement, types.Replicate):
            return AxisLayout(self.mesh, self.axes, None, is_sum)
        if not isinstance(placement, types.Shard):
            raise UnsupportedOpError(
                "a tensor of the global view is sharded or replicated along an axis; "
                f"got {placement!r}. Use Shard(dim) or Replicate()."
            )
        return AxisLayout(self.mesh, self.axes, placement.dim, is_sum)

    def as_device_mesh(self) -> DeviceMesh:
        """The axis as torch's mesh, for a style of the user's."""
        if isinstance(self.device_mesh, DeviceMesh):
            return self.device_mesh
        whole = to_device_mesh(self.mesh)
        if len(self.mesh.mesh_shape) == 1:
            return whole
        if self.mesh.axis_names is None:
            raise MeshError(
                "a style of your own gets a slice of a DeviceMesh, by name; "
                f"got {self.mesh!r} without names. Build it with axis names."
            )
        return whole[self.mesh.axis_names[self.axes[0]]]

    def split(self, dim: int) -> AxisLayout:
        return AxisLayout(self.mesh, self.axes, dim)

    def whole(self) -> AxisLayout:
        return AxisLayout(self.mesh, self.axes)


def style_classes() -> ModuleType:
    """torch's module of parallel styles, imported at the first call, as it takes a second."""
    from torch.distributed.tensor.parallel import style  # noqa: PLC0415

    return style


def apply_style(style: Any, module: nn.Module, over: Axis) -> None:
    """Applies a style to one module."""
    styles = style_classes()
    if isinstance(style, styles.ColwiseParallel):
        _columns(style, module, over)
    elif isinstance(style, styles.RowwiseParallel):
        _rows(style, module, over)
    elif isinstance(style, styles.SequenceParallel):
        _sequence(style, module, over)
    elif isinstance(style, styles.PrepareModuleInputOutput):
        apply_style(style.prepare_module_input, module, over)
        apply_style(style.prepare_module_output, module, over)
    elif isinstance(style, styles.PrepareModuleInput):
        _inputs(style, module, over)
    elif isinstance(style, styles.PrepareModuleOutput):
        _outputs(style, module, over)
    else:
        style._apply(module, over.as_device_mesh())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)  # else an embedding


def _columns(style: Any, module: nn.Module, over: Axis) -> None:
    """Splits a layer's output features.

    Its input is replicated, so the input's gradient is a sum.
    """
    _mark(module, over, {"weight": 0, "bias": 0} if _is_linear(module) else {"weight": 1})
    of_input = over.layout(style.input_layouts[0], is_sum=True)
    own, output = over.split(-1), over.layout(style.output_layouts[0])

    def redistributed(y: torch.Tensor) -> torch.Tensor:
        # First in the layout in which it is computed: for few rows, the partitioner would otherwise
        # gather the weight.
        split: torch.Tensor = Redistribute.apply(y, own, own) if output != own else y
        result: torch.Tensor = Redistribute.apply(split, output, own)
        return result

    _hook(module, lambda x: _gathered(x, over.whole(), of_input), redistributed)
    _keep_shards(module, over)


def _rows(style: Any, module: nn.Module, over: Axis) -> None:
    """Splits a layer's input features, or an embedding's rows. Its result is a sum."""
    is_linear = _is_linear(module)
    _mark(module, over, {"weight": 1} if is_linear else {"weight": 0})
    own = over.split(-1) if is_linear else over.whole()
    of_input = over.layout(style.input_layouts[0])
    output = over.layout(style.output_layouts[0], is_sum=True)
    _hook(
        module,
        lambda x: Redistribute.apply(x, own, of_input),
        lambda y: Redistribute.apply(y, output, over.whole()),
    )


def _sequence(style: Any, module: nn.Module, over: Axis) -> None:
    """Splits a module's input and output along the sequence; its parameters are replicated."""
    _mark(module, over, {})
    split = over.layout(style.sequence_sharding[0])
    _hook(
        module,
        lambda x: Redistribute.apply(x, split, split),
        lambda y: Redistribute.apply(y, split, split),
    )


def _inputs(style: Any, module: nn.Module, over: Axis) -> None:
    """Redistributes a module's inputs."""
    layouts, desired = style.input_layouts, style.desired_input_layouts
    by_name = {
        name: (layout, style.desired_input_kwarg_layouts.get(name))
        for name, layout in style.input_kwarg_layouts.items()
    }

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layouts is not None:
            if len(args) != len(layouts):
                raise ValueError(
                    "input_layouts has one entry for each positional input of the module; "
                    f"got {len(args)} inputs of {type(module).__name__} and {len(layouts)} "
                    "layouts. Write None for an input that stays as it is."
                )
            args = tuple(_redistributed(x, over, *pair) for x, *pair in zip(args, layouts, desired))
        kwargs = {
            name: _redistributed(x, over, *by_name.get(name, (None, None)))
            for name, x in kwargs.items()
        }
        return args, kwargs

    module.register_forward_pre_hook(prepare, with_kwargs=True)
    _keep_shards(module, over)


def _outputs(style: Any, module: nn.Module, over: Axis) -> None:
    """Redistributes a module's results."""

    def prepare(module: nn.Module, args: Any, outputs: Any) -> Any:
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(results) != len(style.output_layouts):
            raise ValueError(
                "output_layouts has one entry for each result of the module; "
                f"got {len(results)} results of {type(module).__name__} and "
                f"{len(style.output_layouts)} layouts. "
                "Write None for a result that stays as it is."
            )
        prepared = tuple(
            _redistributed(x, over, *pair)
            for x, *pair in zip(results, style.output_layouts, style.desired_output_layouts)
        )
        return prepared if isinstance(outputs, tuple) and len(prepared) > 1 else prepared[0]

    module.register_forward_hook(prepare)


def _redistributed(x: Any, over: Axis, layout: Any, desired: Any) -> Any:
    if layout is None or not isinstance(x, XLAShardedTensor):
        return x
    to = over.layout(layout if desired is None else desired)
    # The gradient of a tensor that all devices use is a sum over them.
    return _gathered(x, to, over.layout(layout, is_sum=to.dim is None))


def _gathered(x: Any, to: AxisLayout, of_gradient: AxisLayout) -> torch.Tensor:
    """A module's input in the layout of its forward; `_KeepsShards` finds the gathered ones.

    An input that the enclosing module has redistributed is unchanged: its gradients are added up
    before they are redistributed.
    """
    if x.__dict__.get("_laid_out") == to:
        return x
    y: torch.Tensor = Redistribute.apply(x, to, of_gradient)
    y.__dict__["_laid_out"] = to
    if to.dim is None and of_gradient.dim is not None:
        y.__dict__["_gathered_from"] = _Shards(x, replace(of_gradient, is_sum=False), to)
    return y


@dataclass(frozen=True)
class _Shards:
    """The shards from which an input was gathered, and the layouts of both."""

    tensor: XLAShardedTensor
    layout: AxisLayout
    whole: AxisLayout

    def gather(self, shards: torch.Tensor) -> XLAShardedTensor:
        """Gathers an alias of the tensor. Not differentiable."""
        with torch.no_grad():
            # First in its own layout: the partitioner could otherwise move the gather before a
            # barrier.
            own = along.constrained_to(shards, self.layout)  # type: ignore[arg-type]
            return along.constrained_to(own, self.whole)


class _KeepsShards:
    """Replaces the forward of a module: inputs are saved for backward in shards.

    What Korthikanti et al. (2022) call sequence parallelism: the gathered input of a pair of layers
    is dropped after forward, and gathered again in backward. It applies only to inputs that the
    hooks gathered, and not where a checkpoint decides what is saved.

    Attributes:
        module: the module.
        inner: as `CheckpointedForward.inner`.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, inner
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = inner_forward(self.module, self.inner)
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, XLAShardedTensor)]
        whole = [x for x in inputs if "_gathered_from" in x.__dict__]
        if not whole or not torch.is_grad_enabled() or is_saved_by_others() or in_backward():
            return forward(*args, **kwargs)
        shards: list[_Shards] = [x.__dict__.pop("_gathered_from") for x in whole]
        regather = Regather([s.tensor for s in shards], [s.gather for s in shards], whole)
        with regather.saving_recipes():
            output = forward(*args, **kwargs)
        return regather.before_backward(output)


def _keep_shards(module: nn.Module, over: Axis) -> None:
    own = module.__dict__.get("forward")
    if over.reshards and not isinstance(own, _KeepsShards):
        module.forward = _KeepsShards(module, own)


def _hook(
    module: nn.Module,
    of_input: Callable[[torch.Tensor], torch.Tensor],
    of_output: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Redistributes a module's first input, and its result."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (of_input(args[0]), *args[1:]), kwargs
        if not kwargs:
            return args, kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: of_input(kwargs[first])}

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: of_output(output))


def check_style(style: Any, module: nn.Module) -> None:
    """Raises NotImplementedError if a style does not support this module."""
    require_bool("use_local_output", getattr(style, "use_local_output", True))
    styles = style_classes()
    is_layer = isinstance(style, (styles.ColwiseParallel, styles.RowwiseParallel))
    if is_layer and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise NotImplementedError(
            f"{type(style).__name__} is for nn.Linear and nn.Embedding; "
            f"got {type(module).__name__}. Mark other parameters by spmd.mark_sharding, "
            "and their module's inputs and results by PrepareModuleInputOutput."
        )


def _mark(module: nn.Module, over: Axis, dims: Mapping[str, int]) -> None:
    """Moves a module to the device; the axis splits one dim of each of the named parameters."""
    module.to("xla")
    for name, parameter in module.named_parameters():
        dim = dims.get(name)
        layout = over.whole() if dim is None else over.split(dim)
        sharding = layout.sharding(parameter.dim())
        assert isinstance(parameter, XLAShardedTensor)
        if parameter.sharding is None:
            mark_sharding(parameter, over.mesh, sharding.partition_spec)
        elif parameter.sharding.at_rest != sharding:
            _refuse(name, parameter.sharding, sharding)


def _refuse(name: str, found: Sharding, wanted: Sharding) -> None:
    raise PartitionSpecError(
        "a plan marks parameters that have no other mark; got a parameter "
        f"{name!r} with {found.partition_spec!r} where the plan says {wanted.partition_spec!r}. "
        "Call parallelize_module first, then fully_shard or mark_sharding."
    )
