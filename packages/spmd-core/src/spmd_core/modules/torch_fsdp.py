"""torch's FSDP1 on device `xla`: its constructor makes a module a unit of `fully_shard`, in place.

`FullyShardedDataParallel(module, ...)` returns the module itself, so names in `state_dict()` stay
as they are, as FSDP1 has them too, and its class stays what it is: `isinstance(module, FSDP)` is
False, and `FSDP.fsdp_modules(module)` lists the units. It has the methods of `fsdp_methods` and
those below. What would change values, or where they are, is refused by its name.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import MethodType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from spmd_core.arguments import require_kind
from spmd_core.errors import MeshError, UnsupportedOpError, WrapError
from spmd_core.marks.device_mesh import from_device_mesh
from spmd_core.modules.fsdp_unit import Precision, unit_of
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.modules.wrap_policies import recursive_wrap
from spmd_core.runtime import processes
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# Attributes of a module: what `state_dict()` returns, and whether the unit casts its inputs when it
# is inside of another one.
_SETTINGS, _CASTS_INSIDE = "_spmd_state_dict_settings", "_spmd_casts_inside"
# The parts of torch's module of FSDP1 that `install` needs.
_REPLACED = ("set_state_dict_type", "get_state_dict_type", "summon_full_params", "fsdp_modules")
_REPLACED_OF_OPTIMIZERS = ("optim_state_dict", "optim_state_dict_to_load")
CHANGED = (
    *("StateDictSettings", "StateDictType", "FullStateDictConfig", "FullOptimStateDictConfig"),
    "ShardedStateDictConfig",
    *(f"FullyShardedDataParallel.{name}" for name in (*_REPLACED, *_REPLACED_OF_OPTIMIZERS)),
)


def refuse(what: str, instead: str) -> NoReturn:
    """Raises UnsupportedOpError for an argument or method of FSDP1."""
    raise UnsupportedOpError(
        "on device 'xla', FullyShardedDataParallel makes the module a unit of spmd.fully_shard; "
        f"got {what}. {instead}"
    )


def construct(
    default_mesh: Callable[[], tuple[Any, str]], replicate: Callable[..., None], **given: Any
) -> nn.Module:
    """What `FullyShardedDataParallel(**given)` returns: the module, as a unit.

    Args:
        default_mesh: the mesh of a call without one, and its axis that splits parameters.
        replicate: `replicate(module, parameters, mesh)` marks these as replicated.
        given: the arguments of the constructor.

    Raises:
        UnsupportedOpError: an argument that has no meaning here.
        MeshError: the mesh does not fit the strategy.
        As `fully_shard`.
    """
    module = given["module"]
    _check_arguments(given)
    strategy = getattr(given.get("sharding_strategy"), "name", "FULL_SHARD")
    options: dict[str, Any] = {
        "mesh": given.get("device_mesh"),
        "reshard_after_forward": strategy in ("FULL_SHARD", "HYBRID_SHARD"),
    }
    expected = 2 if "HYBRID" in strategy else 1
    if options["mesh"] is None and expected == 1:
        options["mesh"], options["axis"] = default_mesh()
    elif options["mesh"] is None or len(from_device_mesh(options["mesh"]).axes) != expected:
        shape = "(replicas, shards)" if expected == 2 else "(n,)"
        got = "none" if options["mesh"] is None else repr(options["mesh"])
        raise MeshError(
            f"{strategy} takes a device_mesh of {expected} dimension{'s'[: expected - 1]}, "
            f"{shape}; got {got}. Pass device_mesh=init_device_mesh('xla', {shape}), or a slice."
        )
    mixed = given.get("mixed_precision")
    modules, parameters = _ignored(given)
    if modules or parameters:
        replicate(
            module,
            [*parameters, *(p for m in modules for p in m.parameters())],
            from_device_mesh(options["mesh"]).mesh,
        )
    policy = given.get("auto_wrap_policy")
    if policy is not None:
        _check_ignored_classes(module, mixed)
        recursive_wrap(
            module,
            policy,
            # A CustomPolicy's own arguments of the constructor come in `own`.
            lambda child, **own: _unit(child, options, _own_precision(own, mixed, child)),
            ignored_modules=modules,
            ignored_params=parameters,
            only_wrap_children=True,
        )
    # FSDP1 casts the inputs of the outermost unit, and by default those of no unit inside.
    for inside in module.modules():
        unit = unit_of(inside)
        if unit is not None and _CASTS_INSIDE in inside.__dict__:
            unit.precision = replace(
                unit.precision, cast_forward_inputs=inside.__dict__[_CASTS_INSIDE]
            )
    return _unit(module, options, mixed)


def _unit(module: nn.Module, options: dict[str, Any], mixed: Any) -> nn.Module:
    fully_shard(module, mp_policy=_precision(mixed, module), **options)
    module.__dict__[_CASTS_INSIDE] = bool(mixed and mixed.cast_forward_inputs)
    for name, method in _METHODS.items():
        if not hasattr(type(module), name):
            module.__dict__[name] = MethodType(method, module)
    if not hasattr(type(module), "module") and "module" not in module._modules:
        module.__dict__["module"] = module
    return module


def _own_precision(own: dict[str, Any], mixed: Any, child: nn.Module) -> Any:
    """The MixedPrecision of one unit, which a `CustomPolicy` may give for its module."""
    others = sorted(set(own) - {"mixed_precision"})
    if others:
        refuse(
            f"a CustomPolicy that returns {others} for a {type(child).__name__}",
            "Return True, or {'mixed_precision': ...}.",
        )
    return own.get("mixed_precision", mixed)


def _check_arguments(given: dict[str, Any]) -> None:
    """Refuses arguments that would change values, or where they are."""
    if given.get("process_group") is not None:
        refuse("process_group=", "Pass device_mesh=init_device_mesh('xla', (n,)), without groups.")
    if getattr(given.get("cpu_offload"), "offload_params", False):
        refuse(
            "cpu_offload=CPUOffload(offload_params=True)",
            "Leave it out: parameters stay on the devices, in shards; spmd.save_on_host() keeps "
            "activations on the host.",
        )
    if given.get("param_init_fn") is not None:
        refuse(
            "param_init_fn=",
            "Leave it out: parameters on the meta device are created in shards, and initialised "
            "by reset_parameters().",
        )
    device = given.get("device_id")
    if isinstance(device, torch.device) and device.type != "xla":
        refuse(f"device_id={device}", "Leave it out: one program drives all devices.")
    if given.get("sync_module_states") and processes.process_count() > 1:
        refuse(
            "sync_module_states=True in several processes",
            "Leave it out, and give all processes the same values: torch.manual_seed(0) before "
            "the module is made.",
        )


def _precision(mixed: Any, module: nn.Module) -> Precision:
    """FSDP1's `MixedPrecision` as a unit's precision."""
    if mixed is None:
        return Precision()
    if mixed.keep_low_precision_grads:
        refuse(
            "MixedPrecision(keep_low_precision_grads=True)",
            "Leave it out: a gradient has the dtype of its parameter; model.to(torch.bfloat16) "
            "has both narrow.",
        )
    floating = [n for n, b in module.named_buffers() if b.is_floating_point()]
    if mixed.buffer_dtype is not None and floating:
        refuse(
            f"MixedPrecision(buffer_dtype={mixed.buffer_dtype}) of a module with the buffers "
            f"{', '.join(floating[:3])}",
            "Leave buffer_dtype out, and cast them: module.buffer = "
            f"module.buffer.to({mixed.buffer_dtype}).",
        )
    return Precision(
        mixed.param_dtype,
        mixed.reduce_dtype,
        cast_forward_inputs=mixed.cast_forward_inputs or mixed.cast_root_forward_inputs,
    )


def _check_ignored_classes(module: nn.Module, mixed: Any) -> None:
    """Refuses the modules that FSDP1 keeps in float32 when a policy wraps the others."""
    classes = tuple(getattr(mixed, "_module_classes_to_ignore", ()) or ())
    if mixed is None or mixed.param_dtype is None or not classes:
        return
    for name, child in module.named_modules():
        if isinstance(child, classes):
            refuse(
                f"{name!r}, a {type(child).__name__}, which MixedPrecision with an "
                "auto_wrap_policy keeps in float32",
                "Write MixedPrecision(..., _module_classes_to_ignore=()), or wrap the other "
                "modules one by one, without a policy.",
            )


def _ignored(given: dict[str, Any]) -> tuple[list[nn.Module], list[nn.Parameter]]:
    states: Iterable[Any] = given.get("ignored_states") or ()
    found = [*(given.get("ignored_modules") or ()), *states]
    for each in found:
        require_kind(
            "ignored_states", each, nn.Module, nn.Parameter, write="modules or parameters of it"
        )
    modules = [each for each in found if isinstance(each, nn.Module)]
    return modules, [each for each in found if isinstance(each, nn.Parameter)]


# --- Methods --------------------------------------------------------------------------------------


def _clip_grad_norm_(self: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients so that the norm of all is at most `max_norm`. Returns their norm."""
    return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)


def _register_comm_hook(self: nn.Module, state: object, hook: Any) -> NoReturn:
    refuse(
        "register_comm_hook",
        "Register it on parameters: "
        "parameter.register_post_accumulate_grad_hook(lambda p: hook(state, p.grad)).",
    )


_METHODS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": _clip_grad_norm_,
    "register_comm_hook": _register_comm_hook,
}


# --- Functions of the class -----------------------------------------------------------------------


def _is_ours(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(
        unit_of(m) is not None
        or any(isinstance(p, XLAShardedTensor) for p in m._parameters.values())
        for m in module.modules()
    )


def _set_state_dict_type(
    api: ModuleType, module: nn.Module, kind: Any, config: Any = None, optimizer: Any = None
) -> Any:
    """`FSDP.set_state_dict_type`: what `module.state_dict()` returns from now on.

    FULL_STATE_DICT: whole tensors, on the CPU if the config says so, and in process 0 alone if it
    says so. SHARDED_STATE_DICT: the tensors on the devices, in shards.
    """
    full, sharded = api.StateDictType.FULL_STATE_DICT, api.StateDictType.SHARDED_STATE_DICT
    before = _settings(api, module)
    if kind not in (full, sharded):
        refuse(f"{kind}", "Use StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT.")
    expected = api.FullStateDictConfig if kind is full else api.ShardedStateDictConfig
    config = expected() if config is None else config
    if type(config) is not expected:
        raise RuntimeError(
            f"{kind} takes a {expected.__name__}; got a {type(config).__name__}. "
            f"Pass {expected.__name__}()."
        )
    if kind is sharded and config.offload_to_cpu:
        refuse(
            "ShardedStateDictConfig(offload_to_cpu=True)",
            "Leave it out; spmd.CheckpointManager and torch.distributed.checkpoint read shards.",
        )
    if _SETTINGS not in module.__dict__:
        module.register_state_dict_post_hook(_as_set)
    module.__dict__[_SETTINGS] = api.StateDictSettings(kind, config, optimizer)
    return before


def _settings(api: ModuleType, module: nn.Module) -> Any:
    """`FSDP.get_state_dict_type`; FULL_STATE_DICT if none was set."""
    return module.__dict__.get(_SETTINGS) or api.StateDictSettings(
        api.StateDictType.FULL_STATE_DICT,
        api.FullStateDictConfig(),
        api.FullOptimStateDictConfig(),
    )


def _as_set(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    settings = module.__dict__[_SETTINGS]
    if not getattr(settings.state_dict_config, "offload_to_cpu", False):
        return
    for name, value in [*state.items()]:
        if name.startswith(prefix) and isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu()
    if settings.state_dict_config.rank0_only and not processes.is_master():
        state.clear()


@contextlib.contextmanager
def _summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    offload_to_cpu: bool = False,
    **others: Any,
) -> Iterator[None]:
    """`FSDP.summon_full_params`: a parameter is the whole one already, and writes to it hold."""
    if offload_to_cpu or not writeback:
        refuse(
            f"summon_full_params(writeback={writeback}, offload_to_cpu={offload_to_cpu})",
            "Copy what you read: parameter.detach().cpu().",
        )
    yield


def _units(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
    """`FSDP.fsdp_modules`: the modules that are units, or those of them in no other unit."""
    if unit_of(module) is not None and root_only:
        return [module]
    if not root_only:
        return [one for one in module.modules() if unit_of(one) is not None]
    return [unit for child in module.children() for unit in _units(child, root_only=True)]


def _optimizer_states(name: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(
            name,
            "optimizer.state_dict() is whole already; by the names of parameters it is "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer), "
            "which set_optimizer_state_dict loads.",
        )

    return refused


def install(
    module: ModuleType,
    is_for_xla: Callable[..., bool],
    make: Callable[..., nn.Module],
) -> None:
    """Changes `FullyShardedDataParallel` for modules of device xla.

    Args:
        module: torch's module that has the class.
        is_for_xla: `is_for_xla(*args, **kwargs)` of the constructor's arguments.
        make: `make(**kwargs)` is what the constructor then returns.
    """
    cls = module.FullyShardedDataParallel
    signature = inspect.signature(cls.__init__)

    def new(asked: type, *args: Any, **kwargs: Any) -> Any:
        # Without arguments it is copied, or read from a file.
        if not (args or kwargs) or not is_for_xla(*args, **kwargs):
            return object.__new__(asked)
        if asked is not cls:
            raise WrapError(
                "FullyShardedDataParallel returns the module itself on device 'xla'; "
                f"got its subclass {asked.__name__}. Call spmd.fully_shard(module, mesh)."
            )
        return make(**dict([*signature.bind(None, *args, **kwargs).arguments.items()][1:]))

    cls.__new__ = new
    ours: tuple[Callable[..., Any], ...] = (
        functools.partial(_set_state_dict_type, module),
        functools.partial(_settings, module),
        _summon_full_params,
        _units,
    )
    for name, function in zip(_REPLACED, ours):
        _replace(cls, name, function)
    for name in _REPLACED_OF_OPTIMIZERS:
        _replace(cls, name, _optimizer_states(name))
    for name in ("full_optim_state_dict", "sharded_optim_state_dict"):
        if hasattr(cls, name):
            _replace(cls, name, _optimizer_states(name))


def _replace(cls: Any, name: str, ours: Callable[..., Any]) -> None:
    """Makes a static method call `ours` for modules of this device."""
    theirs = getattr(cls, name)

    @functools.wraps(theirs)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get("module", kwargs.get("model"))
        return ours(*args, **kwargs) if _is_ours(module) else theirs(*args, **kwargs)

    setattr(cls, name, staticmethod(chosen))
