"""Tensor parallelism by a plan: `parallelize_module`, which turns torch's styles into marks.

The styles are torch's own classes, from `torch.distributed.tensor.parallel`. In torch each process
holds local blocks of parameters and activations. Here tensors are global: a style marks the
parameters of its module, and its hooks constrain how the mesh axis splits the inputs and outputs,
and the gradients of both. So the program has the same collectives as torch's, and the model's code
needs no local sizes. The other axes of the mesh are left to the partitioner, for instance for the
batch.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_core.arguments import checked, require_bool
from spmd_core.errors import MeshError, PartitionSpecError, UnsupportedOpError
from spmd_core.marks import along
from spmd_core.marks.along import AxisLayout, Redistribute
from spmd_core.marks.device_mesh import AnyMesh, DeviceMesh, from_device_mesh, to_device_mesh
from spmd_core.marks.marking import mark_sharding
from spmd_core.marks.placements import placement_types
from spmd_core.modules.checkpointing import in_backward, inner_forward
from spmd_core.modules.regather import Regather, is_saved_by_others
from spmd_core.runtime.devices import require_spmd
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend.after_import import after_import

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Plan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"


@checked(src_data_rank=0)
def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: "Plan | None" = None,
    *,
    axis: str | int | None = None,
    reshard_after_forward: bool = True,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelizes modules inside a module along one axis of a mesh, in place, as a plan says.

    torch's `parallelize_module`, for device type "xla". The styles are torch's: `ColwiseParallel`,
    `RowwiseParallel`, `SequenceParallel`, `PrepareModuleInput`, `PrepareModuleOutput`,
    `PrepareModuleInputOutput`, with their arguments and layouts, `Shard(dim)` and `Replicate()`;
    or a `ParallelStyle` of your own. Modules keep their whole sizes: `view(batch, sequence, heads,
    head_dim)` takes the number of all heads. `use_local_output` has no effect, as no tensor is
    local to a device. A plan moves the same data between devices as in torch: for a pair of
    `ColwiseParallel` and `RowwiseParallel` one all-reduce in forward and one in backward. A
    module's input that is gathered from shards, as with `SequenceParallel` before it, is kept in
    shards until backward, and gathered again there.

    The module is moved to device `xla`; parameters that a plan splits are uploaded in shards. Does
    not wait.

    Args:
        module: the module.
        device_mesh: a DeviceMesh of one dimension, such as the slice `mesh["tp"]`, or a `Mesh`;
            None: the global mesh.
        parallelize_plan: a style, for the module itself; or styles by the path of a module inside,
            as in `named_modules()`. Each part of a path may have wildcards (`layers.*.wq`); the
            empty path is the module.
        axis: the axis of a `Mesh` of several axes, by name or number.
        reshard_after_forward: False keeps gathered inputs from forward to backward, as torch does:
            it takes more memory and saves a gather for each of these modules.
        src_data_rank: a rank of the mesh, without effect. All processes give the same values here.

    Returns:
        The module.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        MeshError: the mesh has several axes and none is named; see `from_device_mesh` too.
        ValueError: a path matches no module, or the mesh has no such rank. Nothing was changed.
        TypeError: the plan is neither a style nor a dict of styles.
        NotImplementedError: `ColwiseParallel` or `RowwiseParallel` of a module that is neither
            `nn.Linear` nor `nn.Embedding`.
        PartitionSpecError: a parameter was marked in another way before.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> mesh = Mesh(range(8), (2, 4), ("data", "tensor"))
        >>> mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> parallelize_module(mlp, mesh, plan, axis="tensor")[2].weight.partition_spec
        (None, 'tensor')
    """
    require_spmd("parallelize_module")
    over = replace(_axis_of(device_mesh, axis), reshards=reshard_after_forward)
    if src_data_rank is not None and src_data_rank >= over.mesh.size():
        raise ValueError(
            f"src_data_rank is a rank of the mesh, below {over.mesh.size()}; "
            f"got {src_data_rank!r}. Write src_data_rank=0, or leave it out."
        )
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module changes nothing without a plan; got None. "
            "Pass a style, or a dict of styles by the paths of modules.",
            stacklevel=3,  # of the caller: `checked` wraps this function
        )
        return module
    style_class = _styles().ParallelStyle
    styles = (
        {"": parallelize_plan} if isinstance(parallelize_plan, style_class) else parallelize_plan
    )
    if not isinstance(styles, Mapping) or not all(
        isinstance(style, style_class) for style in styles.values()
    ):
        raise TypeError(
            "a plan is a style of torch.distributed.tensor.parallel, or a dict of styles by paths; "
            f"got {parallelize_plan!r}. Write for instance {{'layers.*.wq': ColwiseParallel()}}."
        )
    found = [(_matching(module, path), style) for path, style in styles.items()]
    for modules, style in found:
        for each in modules:
            _check(style, each)
    module.to("xla")
    for modules, style in found:
        for each in modules:
            _apply(style, each, over)
    return module


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside of it, the cross entropy of logits that are split by classes gathers no logits.

    torch's context, for programs that use it. There is nothing to switch on here: wherever
    `F.cross_entropy`, with any of its options, gets logits whose classes a mesh axis splits, as by
    `ColwiseParallel` of the last layer, forward and backward exchange only some numbers for each
    token. `use_local_output=False` is not needed.
    """
    yield


@dataclass(frozen=True)
class _Axis:
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


def _axis_of(device_mesh: AnyMesh | None, axis: str | int | None) -> _Axis:
    over = from_device_mesh(device_mesh)
    given = over.mesh if device_mesh is None else device_mesh
    if axis is not None:
        index = over.mesh.get_axis_name_idx(axis) if isinstance(axis, str) else axis
        if not isinstance(index, int) or not 0 <= index < len(over.mesh.mesh_shape):
            raise MeshError(
                f"axis names one axis of the mesh; got {axis!r} for {over.mesh!r}. "
                f"Use one of {over.mesh.axis_names or [*range(len(over.mesh.mesh_shape))]}."
            )
        return _Axis(over.mesh, (index,), given)
    if len(over.axes) != 1:
        raise MeshError(
            "a plan is for one axis of a mesh; "
            f"got {given!r} with {len(over.axes)} axes. "
            "Name one by parallelize_module(..., axis=), or pass a slice such as mesh['tp']."
        )
    return _Axis(over.mesh, over.axes[0], given)


def _matching(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules inside that match a path.

    Raises:
        ValueError: there is none.
    """
    found = {"": module}
    for part in path.split(".") if path else ():
        below = {
            f"{name}.{child}" if name else child: inside
            for name, each in found.items()
            for child, inside in each.named_children()
        }
        found = {
            name: each for name, each in below.items() if fnmatchcase(name.split(".")[-1], part)
        }
        if not found:
            known = [name for name, _ in module.named_modules() if name]
            near = difflib.get_close_matches(path, known, n=3) or [
                name for name in below if difflib.get_close_matches(part, [name.split(".")[-1]])
            ]
            raise ValueError(
                "each path of a plan names a module; "
                f"got {path!r}, of which {part!r} matches none of "
                f"{', '.join(sorted({name.split('.')[-1] for name in below})) or 'no modules'}. "
                f"Near names: {', '.join(near[:3]) or 'none'}. Nothing was changed."
            )
    return list(found.values())


def _styles() -> ModuleType:
    """torch's module of parallel styles, imported at the first call, as it takes a second."""
    from torch.distributed.tensor.parallel import style  # noqa: PLC0415

    return style


def _apply(style: Any, module: nn.Module, over: _Axis) -> None:
    """Applies a style to one module."""
    styles = _styles()
    if isinstance(style, styles.ColwiseParallel):
        _columns(style, module, over)
    elif isinstance(style, styles.RowwiseParallel):
        _rows(style, module, over)
    elif isinstance(style, styles.SequenceParallel):
        _sequence(style, module, over)
    elif isinstance(style, styles.PrepareModuleInputOutput):
        _apply(style.prepare_module_input, module, over)
        _apply(style.prepare_module_output, module, over)
    elif isinstance(style, styles.PrepareModuleInput):
        _inputs(style, module, over)
    elif isinstance(style, styles.PrepareModuleOutput):
        _outputs(style, module, over)
    else:
        style._apply(module, over.as_device_mesh())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)  # else an embedding


def _columns(style: Any, module: nn.Module, over: _Axis) -> None:
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


def _rows(style: Any, module: nn.Module, over: _Axis) -> None:
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


def _sequence(style: Any, module: nn.Module, over: _Axis) -> None:
    """Splits a module's input and output along the sequence; its parameters are replicated."""
    _mark(module, over, {})
    split = over.layout(style.sequence_sharding[0])
    _hook(
        module,
        lambda x: Redistribute.apply(x, split, split),
        lambda y: Redistribute.apply(y, split, split),
    )


def _inputs(style: Any, module: nn.Module, over: _Axis) -> None:
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


def _outputs(style: Any, module: nn.Module, over: _Axis) -> None:
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


def _redistributed(x: Any, over: _Axis, layout: Any, desired: Any) -> Any:
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


def _keep_shards(module: nn.Module, over: _Axis) -> None:
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


def _check(style: Any, module: nn.Module) -> None:
    """Raises NotImplementedError if a style does not support this module."""
    require_bool("use_local_output", getattr(style, "use_local_output", True))
    styles = _styles()
    is_layer = isinstance(style, (styles.ColwiseParallel, styles.RowwiseParallel))
    if is_layer and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise NotImplementedError(
            f"{type(style).__name__} is for nn.Linear and nn.Embedding; "
            f"got {type(module).__name__}. Mark other parameters by spmd.mark_sharding, "
            "and their module's inputs and results by PrepareModuleInputOutput."
        )


def _mark(module: nn.Module, over: _Axis, dims: Mapping[str, int]) -> None:
    """Moves a module to the device; the axis splits one dim of each of the named parameters."""
    module.to("xla")
    for name, parameter in module.named_parameters():
        dim = dims.get(name)
        layout = over.whole() if dim is None else over.split(dim)
        sharding = layout.sharding(parameter.dim())
        assert isinstance(parameter, XLAShardedTensor)
        if parameter.sharding is None:
            mark_sharding(parameter, over.mesh, sharding.partition_spec)
        elif parameter.sharding != sharding:
            _refuse(name, parameter.sharding, sharding)


def _refuse(name: str, found: Sharding, wanted: Sharding) -> None:
    raise PartitionSpecError(
        "a plan marks parameters that have no other mark; got a parameter "
        f"{name!r} with {found.partition_spec!r} where the plan says {wanted.partition_spec!r}. "
        "Call parallelize_module first, then fully_shard or mark_sharding."
    )


def _take_over_styles(styles: ModuleType) -> None:
    """Makes torch's styles mark parameters when torch's `parallelize_module` applies them."""
    for name in (
        *("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput"),
        *("PrepareModuleOutput", "PrepareModuleInputOutput"),
    ):
        style_class = getattr(styles, name)
        style_class._apply = _taken_over(style_class._apply)


def _taken_over(torch_apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def apply(self: Any, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.device_type != "xla":
            return torch_apply(self, module, device_mesh)
        require_spmd("parallelize_module")
        over = _axis_of(device_mesh, None)
        _check(self, module)
        _apply(self, module, over)
        return module

    return apply


after_import("torch.distributed.tensor.parallel.style", _take_over_styles)
