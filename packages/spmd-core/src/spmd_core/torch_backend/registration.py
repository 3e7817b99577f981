"""Makes `device="xla"` work with a stock torch wheel.

Installs the operations' router, the device guard, the device module `torch.xla`, the basic
factories and the copy between devices.
"""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from spmd_core.dispatch import automatic_cut, composite, router, selections, transfer
from spmd_core.errors import DeviceMismatchError
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import Storage
from spmd_core.program import execution, leaves
from spmd_core.runtime import interrupts, processes
from spmd_core.tensor.logical_device import XLA_DEVICE, as_device, require_logical
from spmd_core.tensor.selected_tensor import SelectedTensor
from spmd_core.tensor.sharded_tensor import XLAShardedTensor
from spmd_core.torch_backend import (
    conversions,
    device_guard,
    forward_mode,
    generators,
    locations,
    momentum,
    random_state,
    refusals,
    subclasses,
    torchvision_ops,
    uninitialized,
)


def _device_module() -> types.ModuleType:
    module = types.ModuleType(
        "torch.xla", "What torch asks of every device type, for device 'xla'."
    )

    def current_device() -> int:
        return 0

    def set_device(device: Any) -> None:
        if isinstance(device, int) and not isinstance(device, bool):
            device = f"xla:{device}"
        device = as_device("device", "xla" if device is None else device)
        if device.type != "xla":
            raise DeviceMismatchError(
                f"torch.xla has one logical device, 'xla'; got {str(device)!r}. Write 'xla'."
            )

    def device(index: Any = 0) -> AbstractContextManager[None]:
        set_device(index)
        return nullcontext()

    def get_rng_state(device: Any = "xla") -> torch.Tensor:
        set_device(device)
        return torch.default_generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "xla") -> None:
        set_device(device)
        torch.default_generator.set_state(new_state)

    def synchronize(device: Any = None) -> None:
        set_device(device)
        execution.cut(wait=True)

    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": current_device,
        "set_device": set_device,
        "device": device,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": random_state.manual_seed,
        "manual_seed_all": random_state.manual_seed,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "memory_stats": processes.memory_stats,
        XLAShardedTensor.__name__: XLAShardedTensor,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _made_on_host(
    factory: Callable[..., torch.Tensor], default: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    """A factory that runs on the CPU, as its arguments determine the result.

    torch has a different kernel for each device, so there is no common one to record.
    """

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        require_logical(kwargs.get("device"))
        return factory(*args, dtype=kwargs.get("dtype") or default, device="cpu").to(XLA_DEVICE)

    return kernel


def _with_xla(supported: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*supported(), "xla"]


def _like_its_parameter(process: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Places a loaded optimizer state as the optimizer would place a new one.

    It is sharded like its parameter. A count of steps is on the host, unless the optimizer counts
    on the device: otherwise it would be read from the device at each step.
    """

    def processed(
        param: torch.Tensor,
        value: torch.Tensor,
        param_id: int,
        param_groups: list[dict[Any, Any]],
        key: Any = None,
    ) -> torch.Tensor:
        result = process(param, value, param_id, param_groups, key)
        if not isinstance(param, XLAShardedTensor) or not isinstance(result, XLAShardedTensor):
            return result
        if key == "step":
            (group,) = (g for g in param_groups if param_id in g["params"])
            counts_on_device = group.get("fused") or group.get("capturable")
            return result if counts_on_device else result.cpu()
        if result.shape == param.shape:
            handle = result._handle
            if (
                param.sharding is not None
                and handle.sharding is None
                and isinstance(handle, Storage)
            ):
                with lock:
                    leaves.set_sharding(handle, param.sharding)
        return result

    return processed


def _install() -> torch.library.Library:
    XLAShardedTensor.__torch_dispatch__ = classmethod(router.route)  # type: ignore[assignment, method-assign]
    SelectedTensor.__torch_dispatch__ = classmethod(selections.route)  # type: ignore[assignment, method-assign]
    automatic_cut.install()
    interrupts.protect()
    device_guard.install()
    torch._register_device_module("xla", _device_module())
    generators.install()
    locations.install()
    subclasses.install()
    uninitialized.install()
    conversions.install()
    momentum.install()
    # `make_fx` leaves operations on other classes out of the graph that it traces.
    proxy_tensor.HANDLED_TYPES += (XLAShardedTensor,)  # type: ignore[assignment]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", selections.factory(transfer.empty), "XLA")
    library.impl("empty_strided", selections.factory(transfer.empty_strided), "XLA")
    forward_mode.install()
    library.impl("_copy_from", transfer.copy_from, "XLA")
    # Autograd checks for known zeros only to save work, which the compiler saves for all zeros.
    library.impl("_efficientzerotensor", torch.zeros, "XLA")
    # torch.tensor reads the elements of a list of tensors below Python's dispatch.
    library.impl("_local_scalar_dense", lambda x: transfer.item((x,), {}), "XLA")
    for name in ("tril_indices", "triu_indices"):
        library.impl(name, _made_on_host(getattr(torch, name), torch.int64), "XLA")
    for name in ("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"):
        library.impl(name, _made_on_host(torch.kaiser_window, None), "XLA")
    # torch has no registration for devices with foreach kernels or fused optimizers: functions
    # return the lists. That of foreach kernels is for `clip_grad_norm_(foreach=True)`.
    _foreach_utils._get_foreach_kernels_supported_devices = _with_xla(
        _foreach_utils._get_foreach_kernels_supported_devices
    )
    optimizer._get_fused_kernels_supported_devices = _with_xla(
        optimizer._get_fused_kernels_supported_devices
    )
    # torch has no hook for a single value of a loaded state, and in its hook for the whole state
    # all values are already on the devices, replicated.
    process = _like_its_parameter(torch.optim.Optimizer._process_value_according_to_param_policy)
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(process)  # type: ignore[method-assign]
    return library


def device() -> torch.device:
    """The one logical device, `xla:0`, which stands for all devices of all hosts.

    Another index is refused where it is used. torch keeps 8 bits of one: it reads "xla:256" as
    "xla:0", and nothing can tell the two apart.
    """
    return XLA_DEVICE


# torch drops registrations when their Library is deleted, so the module keeps them.
_libraries = (
    _install(),
    composite.install(),
    refusals.install(),
    torchvision_ops.install(),
)
