"""torch's data parallelism for modules of device `xla`: FSDP works, other wrappers are refused.

For such a module, torch's `fully_shard` and `FullyShardedDataParallel` (`torch_fsdp.py`) call this
project's function. Classes that run one replica in each
process (DDP, pipeline stages, ZeRO) have no meaning in one program over all devices; their
constructors raise an error that says what to write instead. Programs import torch's names early, so
the replacement is made inside the named objects: the function in a decorator's closure, a class's
`__init__`.
"""

import functools
import warnings
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spmd_core import releases
from spmd_core.arguments import require_kind
from spmd_core.errors import MeshError, UnsupportedOpError, WrapError
from spmd_core.marks.device_mesh import AnyMesh, from_device_mesh
from spmd_core.marks.marking import mark_sharding
from spmd_core.modules import torch_fsdp
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.runtime import devices
from spmd_core.sharding.mesh import Mesh, get_global_mesh
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend.after_import import after_import

_ONE_PROGRAM = "in SPMD mode one program drives all devices"
_AS_IT_IS = (
    "Use the model as it is, and split the batch: spmd.mark_sharding(x, mesh, ('data',)); "
    "gradients are then those of the whole batch."
)


def _is_for_xla(modules: Any, mesh: Any = None) -> bool:
    """Whether a call is for this device: by its mesh, its tensors, or SPMD mode without a group."""
    if getattr(mesh, "device_type", None) == "xla":
        return True
    roots = modules if isinstance(modules, (list, tuple)) else [modules]
    tensors = [t for m in roots if isinstance(m, nn.Module) for t in m.parameters()]
    if any(isinstance(t, XLAShardedTensor) for t in tensors):
        return True
    return mesh is None and devices.is_spmd() and not distributed.is_initialized()


# --- fully_shard ----------------------------------------------------------------------------------


_IGNORED = "the parameters in a set, such as {model.head.weight}"


def _fully_shard(
    module: Any,
    *,
    mesh: AnyMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """torch's `fully_shard`, by this project's function. Without a mesh it uses `_default_mesh`."""
    if shard_placement_fn is not None:
        _refuse_argument(
            "shard_placement_fn",
            "Mark these parameters before: spmd.mark_sharding(parameter, mesh, spec); a mark "
            "with the axis that splits parameters is kept.",
        )
    if dp_mesh_dims is not None:
        _refuse_argument("dp_mesh_dims", "Pass a slice: mesh=mesh['replicate', 'shard'].")
    if hasattr(offload_policy, "pin_memory"):
        _refuse_argument(
            "offload_policy=CPUOffloadPolicy()",
            "Leave it out: parameters stay on the devices, in shards; spmd.save_on_host() "
            "keeps activations on the host.",
        )
    kinds = {kind.__name__ for kind in type(offload_policy).__mro__}  # torch's import is slow
    if offload_policy is not None and "OffloadPolicy" not in kinds:
        _refuse_argument(f"offload_policy={offload_policy!r}", "Leave it out.")
    if ignored_params is not None:
        require_kind("ignored_params", ignored_params, set, frozenset, list, tuple, write=_IGNORED)
    if not isinstance(reshard_after_forward, (bool, type(None))):
        _refuse_argument(
            f"reshard_after_forward={reshard_after_forward!r}",
            "Pass True, or False to keep gathered parameters until backward.",
        )
    options: dict[str, Any] = {"mp_policy": mp_policy}
    options["reshard_after_forward"] = reshard_after_forward is not False
    if mesh is None:
        mesh, options["axis"] = _default_mesh()
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if ignored_params:
            _replicate(each, ignored_params, from_device_mesh(mesh).mesh)
        fully_shard(each, mesh, **options)
    return module


def _default_mesh() -> tuple[Mesh, str]:
    """The global mesh, else one of all devices, and the name of the axis that splits parameters."""
    mesh = get_global_mesh()
    if mesh is None:
        count = devices.global_runtime_device_count()
        return Mesh(range(count), (count,), ("fsdp",)), "fsdp"
    names = mesh.axis_names or ()
    if len(names) == 1 or "fsdp" in names:
        return mesh, "fsdp" if "fsdp" in names else names[0]
    if len(mesh.mesh_shape) == 1:
        return Mesh(mesh.device_ids, mesh.mesh_shape, ("fsdp",)), "fsdp"
    raise MeshError(
        "fully_shard without a mesh takes the global mesh, whose axis 'fsdp' splits parameters; "
        f"got {mesh!r}. Name one of its axes 'fsdp', or pass a slice of "
        "spmd.dtensor.to_device_mesh(mesh), such as mesh['data']."
    )


def _replicate(module: nn.Module, ignored: Collection[nn.Parameter], mesh: Mesh) -> None:
    """Replicates the ignored parameters, which `fully_shard` then leaves unsharded."""
    if any(t.is_meta for t in module.parameters()):
        _refuse_argument(
            "ignored_params of a module with parameters on the meta device",
            "Create it first: module.to_empty(device='xla').",
        )
    chosen = {id(p) for p in ignored}
    module.to("xla")
    for parameter in module.parameters():
        if id(parameter) in chosen:
            mark_sharding(parameter, mesh, ())


def _refuse_argument(what: str, instead: str) -> NoReturn:
    raise UnsupportedOpError(
        "on device 'xla', fully_shard places parameters by marks over a mesh; "
        f"got {what}. {instead}"
    )


def _replace_in_contract(function: Any, ours: Callable[..., Any]) -> None:
    """Makes a function that torch decorates by `contract` call another one for xla modules."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    names = function.__globals__
    if "func" not in cells or not {"STATE_KEY", "REGISTRY_KEY"} <= set(names):
        releases.note_absent("torch.distributed._composable.contract.STATE_KEY")
        return
    cell = cells["func"]
    theirs = cell.cell_contents

    @functools.wraps(theirs)
    def chosen(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_for_xla(module, kwargs.get("mesh", kwargs.get("device_mesh"))):
            return theirs(module, *args, **kwargs)
        for each in module if isinstance(module, (list, tuple)) else [module]:
            # The decorator has registered the call on the module, where other functions of torch
            # would look for the state of torch's own function.
            for key in (names["STATE_KEY"], names["REGISTRY_KEY"]):
                noted = each.__dict__.get(key, {})
                noted.pop(chosen, None)
                noted.pop(theirs.__name__, None)
                if not noted:
                    each.__dict__.pop(key, None)
        return ours(module, *args, **kwargs)

    cell.cell_contents = chosen


# --- Wrappers of one replica in each process ------------------------------------------------------


def _refuse_wrapper(name: str, rule: str, instead: str) -> NoReturn:
    raise WrapError(
        f"{_ONE_PROGRAM}, and {rule}; got {name} of a module for device 'xla'. {instead}"
    )


def _refuse_replicas(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse_wrapper("replicate", "there are no replicas in processes", _AS_IT_IS)


def _guard(cls: Any, refuse: Callable[..., None], is_for_xla: Callable[..., bool]) -> None:
    """Makes a class's constructor call `refuse` first if it is called for this device."""
    theirs = cls.__init__

    @functools.wraps(theirs)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_for_xla(*args, **kwargs):
            refuse(*args, **kwargs)
        theirs(self, *args, **kwargs)

    cls.__init__ = guarded


def _first_is_for_xla(module: Any = None, *args: Any, **kwargs: Any) -> bool:
    return _is_for_xla(module, kwargs.get("device_mesh"))


def _ddp_is_for_xla(module: Any = None, *args: Any, **kwargs: Any) -> bool:
    # Between processes with devices of their own, DDP exchanges gradients through the host. Each
    # exchange is counted, with a warning (`dispatch.process_groups`).
    between_processes = distributed.is_initialized() and not devices.is_spmd()
    return not between_processes and _first_is_for_xla(module, **kwargs)


def _refuse_ddp(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse_wrapper("DistributedDataParallel", "there are no replicas in processes", _AS_IT_IS)


def _make_fsdp(**given: Any) -> nn.Module:
    strategy = getattr(given.get("sharding_strategy"), "name", "FULL_SHARD")
    if strategy == "NO_SHARD":
        _refuse_wrapper("FullyShardedDataParallel(NO_SHARD)", "it shards nothing", _AS_IT_IS)
    return torch_fsdp.construct(_default_mesh, _replicate, **given)


def _refuse_stage(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse_wrapper(
        "a pipeline stage",
        "its stages are positions of a mesh axis",
        "Write spmd.pipeline(model, mesh, num_microbatches=8), whose mesh has an axis 'pipe'.",
    )


def _refuse_zero(*args: Any, **kwargs: Any) -> NoReturn:
    raise WrapError(
        f"{_ONE_PROGRAM}, and an optimizer's state is split as its parameter is; got "
        "ZeroRedundancyOptimizer over parameters of device 'xla'. Split the parameters by "
        "spmd.fully_shard(model, mesh), and use the optimizer itself: "
        "torch.optim.AdamW(model.parameters())."
    )


def _guard_zero(module: ModuleType) -> None:
    theirs = module.ZeroRedundancyOptimizer.__init__

    @functools.wraps(theirs)
    def guarded(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        given = list(params)  # an iterator is read once
        groups = [g["params"] if isinstance(g, dict) else [g] for g in given]
        if any(isinstance(p, XLAShardedTensor) for group in groups for p in group):
            _refuse_zero()
        theirs(self, given, *args, **kwargs)

    module.ZeroRedundancyOptimizer.__init__ = guarded


def _warn_of_data_parallel(*args: Any, **kwargs: Any) -> None:
    warnings.warn(
        f"{_ONE_PROGRAM}, and torch.nn.DataParallel calls a module of device 'xla' as it is. "
        f"{_AS_IT_IS}",
        stacklevel=4,
    )


def _guard_tracing(module: ModuleType) -> None:
    theirs = module.Pipe.from_tracing

    @functools.wraps(theirs)
    def from_tracing(mod: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_for_xla(mod):
            _refuse_stage()
        return theirs(mod, *args, **kwargs)

    module.Pipe.from_tracing = staticmethod(from_tracing)


# --- Checkpoints in the background ----------------------------------------------------------------


def _stage_by_copies(module: ModuleType) -> None:
    """Makes torch's `async_save` of checkpoints copy tensors of the device, not their bytes."""
    stager = module.StateDictStager
    theirs = stager._offload_tensor

    @functools.wraps(theirs)
    def offload(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(x, XLAShardedTensor):
            return x.detach().cpu()
        staged: torch.Tensor = theirs(self, x, *args, **kwargs)
        return staged

    stager._offload_tensor = offload


def install() -> None:
    """Replaces these parts of torch, now or when the program imports them."""
    _guard(DistributedDataParallel, _refuse_ddp, _ddp_is_for_xla)
    _guard(DataParallel, _warn_of_data_parallel, lambda module, *a, **k: _holds_xla(module))
    after_import(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        lambda m: _replace_in_contract(m.fully_shard, _fully_shard),
        "fully_shard",
    )
    for name in ("replicate", "replicate_with_fsdp"):
        after_import(
            f"torch.distributed._composable.{name}",
            lambda m: _replace_in_contract(m.replicate, _refuse_replicas),
            "replicate",
        )
    after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        lambda m: torch_fsdp.install(m, _first_is_for_xla, _make_fsdp),
        *torch_fsdp.CHANGED,
    )
    after_import(
        "torch.distributed.pipelining.stage",
        lambda m: _guard(m._PipelineStageBase, _refuse_stage, _first_is_for_xla),
        "_PipelineStageBase",
    )
    after_import("torch.distributed.pipelining._IR", _guard_tracing, "Pipe.from_tracing")
    after_import(
        "torch.distributed.optim.zero_redundancy_optimizer", _guard_zero, "ZeroRedundancyOptimizer"
    )
    after_import(
        "torch.distributed.checkpoint._state_dict_stager",
        _stage_by_copies,
        "StateDictStager._offload_tensor",
    )


def _holds_xla(module: Any) -> bool:
    return any(isinstance(p, XLAShardedTensor) for p in module.parameters())
