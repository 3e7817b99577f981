"""Tensor parallelism by a plan: `parallelize_module`, which turns torch's styles into marks.

The styles are torch's own classes, from `torch.distributed.tensor.parallel`. In torch each process
holds local blocks of parameters and activations. Here tensors are global: a style marks the
parameters of its module, and its hooks constrain how the mesh axis splits the inputs and outputs,
and the gradients of both. So the program has the same collectives as torch's, and the model's code
needs no local sizes. The other axes of the mesh are left to the partitioner, for instance for the
batch.
"""

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from spmd_core.arguments import checked, require_kind
from spmd_core.errors import MeshError
from spmd_core.marks.device_mesh import AnyMesh, DeviceMesh, from_device_mesh
from spmd_core.modules.head_counts import restore_head_counts
from spmd_core.modules.parallel_styles import Axis, apply_style, check_style, style_classes
from spmd_core.runtime.devices import require_spmd
from spmd_core.torch_backend.after_import import after_import
from spmd_core.torch_backend.function_bodies import replace_body

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

ParallelizePlan: TypeAlias = "ParallelStyle | Mapping[str, ParallelStyle]"


@checked(src_data_rank=0)
def parallelize_module(
    module: nn.Module,
    device_mesh: AnyMesh | None = None,
    parallelize_plan: "ParallelizePlan | None" = None,
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
    head_dim)` takes the number of all heads; counts that were divided by hand are set back, with a
    warning (`modules/head_counts.py`). `use_local_output` has no effect, as no tensor is
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
        >>> import spmd_core as spmd
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> mesh = spmd.Mesh(range(8), (2, 4), ("data", "tensor"))
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
    style_class = style_classes().ParallelStyle
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
            check_style(style, each)
    module.to("xla")
    for modules, style in found:
        for each in modules:
            apply_style(style, each, over)
    restore_head_counts(module, over.mesh, over.axes, depth=3)  # `checked` wraps this function
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


def _axis_of(device_mesh: AnyMesh | None, axis: str | int | None) -> Axis:
    over = from_device_mesh(device_mesh)
    given = over.mesh if device_mesh is None else device_mesh
    if axis is not None:
        index = over.mesh.get_axis_name_idx(axis) if isinstance(axis, str) else axis
        if not isinstance(index, int) or not 0 <= index < len(over.mesh.mesh_shape):
            raise MeshError(
                f"axis names one axis of the mesh; got {axis!r} for {over.mesh!r}. "
                f"Use one of {over.mesh.axis_names or [*range(len(over.mesh.mesh_shape))]}."
            )
        return Axis(over.mesh, (index,), given)
    if len(over.axes) != 1:
        raise MeshError(
            "a plan is for one axis of a mesh; "
            f"got {given!r} with {len(over.axes)} axes. "
            "Name one by parallelize_module(..., axis=), or pass a slice such as mesh['tp']."
        )
    return Axis(over.mesh, over.axes[0], given)


def _matching(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules inside that match a path.

    Raises:
        ValueError: there is none.
    """
    require_kind("a module's name in the plan", path, str, write="such as 'layers.*.mlp'")
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
        check_style(self, module)
        apply_style(self, module, over)
        return module

    return apply


# Whether torch's `parallelize_module` is running, which calls itself for the modules inside.
# Guarded by: the context. Cleared by: the end of the outermost call.
_is_nested: ContextVar[bool] = ContextVar("is_nested", default=False)


def _restoring(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """torch's `parallelize_module`, and head counts that the program divided before it."""

    def parallelize(*args: Any, **kwargs: Any) -> nn.Module:
        if _is_nested.get():
            return original(*args, **kwargs)
        token = _is_nested.set(True)
        try:
            module = original(*args, **kwargs)
        finally:
            _is_nested.reset(token)
        mesh = args[1] if len(args) > 1 else kwargs.get("device_mesh")
        if isinstance(mesh, DeviceMesh) and mesh.device_type == "xla" and mesh.ndim == 1:
            over = from_device_mesh(mesh)
            restore_head_counts(module, over.mesh, over.axes[0], depth=3)
        return module

    return parallelize


after_import("torch.distributed.tensor.parallel.style", _take_over_styles)
after_import(
    "torch.distributed.tensor.parallel.api",
    lambda module: replace_body(module.parallelize_module, _restoring),
)
