"""torch_xla's first FSDP in SPMD mode: its constructor's arguments as those of `fully_shard`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spmd_core as spmd
from spmd_core.modules import fully_shard
from spmd_core.modules.fsdp_unit import Precision
from torch_xla._upstream import refuse

_REASON = "shards one process's replica, and SPMD has one process with all devices"
# How a process stores its shards, and when it communicates.
_NO_EFFECT = {
    *("flatten_parameters", "execute_sharding_on_init", "optimization_barrier_in_forward"),
    *("optimization_barrier_in_backward", "mark_step_on_finalization", "mark_step_on_freeing"),
    *("disable_reshard_on_root", "shard_param_on_dim_0", "pin_layout_in_collective_ops"),
    *("coalesce_all_gather_ops", "opt_flatten_overlap", "reduce_scatter_bucket_size_mb"),
    *("all_gather_bucket_size_mb", "_shard_size_multiple", "_pin_layout_in_collective_ops"),
}
_REFUSED = {
    *("sharding_groups", "sharding_rank", "sharding_world_size", "param_init_fn"),
    "ignored_modules",
}


class XlaFullyShardedDataParallel(fully_shard.SpmdFullyShardedDataParallel):
    """Shards a module's parameters over the axis "fsdp" of the global mesh, else over all devices.

    What `spmd_core.fully_shard` does: values are those of the module on one device, `state_dict()`
    is whole, and gradients are those of the whole batch. SPMD mode must be on.

    Args:
        module: the module; it is changed in place.
        reshard_after_forward: False keeps gathered parameters from forward to backward.
        compute_dtype: in which parameters are gathered and used.
        buffer_dtype: to which floating-point buffers are cast; None: `compute_dtype`.
        fp32_reduce_scatter: whether gradients are summed in float32.
        auto_wrap_policy: as for `SpmdFullyShardedDataParallel`.
        auto_wrapper_callable: `auto_wrapper_callable(child)` makes the units inside; by default
            this class.
        others: torch_xla's other arguments. Those of how a process stores shards and when it
            communicates have no effect; `sharding_groups`, `param_init_fn` and others are refused.

    Raises:
        NotImplementedError: SPMD mode is off, or an argument is refused.
        TypeError: an argument that torch_xla has not.
        MeshError: the global mesh has no axis "fsdp".
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        auto_wrap_policy: Any = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        **others: Any,
    ) -> None:
        _check(others)
        mesh = spmd.get_global_mesh()
        if mesh is None:
            count = spmd.global_runtime_device_count()
            mesh = spmd.Mesh(range(count), (count,), ("fsdp",))
        _cast_buffers(module, buffer_dtype or compute_dtype)

        def wrap(child: nn.Module, **kwargs: Any) -> nn.Module:
            if auto_wrapper_callable is not None:
                return auto_wrapper_callable(child)
            return XlaFullyShardedDataParallel(
                child,
                reshard_after_forward,
                compute_dtype=compute_dtype,
                buffer_dtype=buffer_dtype,
                fp32_reduce_scatter=fp32_reduce_scatter,
            )

        super().__init__(
            module,
            mesh,
            auto_wrap_policy=auto_wrap_policy,
            auto_wrapper_callable=wrap,
            reshard_after_forward=reshard_after_forward,
            mp_policy=Precision(compute_dtype, torch.float32 if fp32_reduce_scatter else None),
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: Any = None
    ) -> torch.Tensor:
        """Scales the gradients so that the norm of all is at most `max_norm`. Returns the norm."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def get_shard_metadata(self) -> None:
        """Refused: `state_dict()` is whole, and needs no metadata to be joined."""
        refuse("get_shard_metadata", _REASON, "Save state_dict(): it is whole.")


def _check(others: dict[str, Any]) -> None:
    if not spmd.is_spmd():
        refuse(
            "XlaFullyShardedDataParallel outside of SPMD mode",
            _REASON,
            "Call torch_xla.runtime.use_spmd() first.",
        )
    for name, value in others.items():
        if name not in _NO_EFFECT | _REFUSED:
            raise TypeError(
                f"XlaFullyShardedDataParallel has no argument {name!r}; got {value!r}. "
                "Leave it out."
            )
        if name in _REFUSED and value is not None and value != []:
            refuse(
                f"XlaFullyShardedDataParallel({name}=...)",
                _REASON,
                "Leave it out: a mesh says which devices share a parameter, and "
                "spmd_core.mark_sharding(parameter, mesh, ()) before keeps one replicated.",
            )


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for inside in module.modules():
        for name, buffer in inside._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                inside._buffers[name] = buffer.to(dtype)
