"""Names that left the package's top level: each still works, with a warning that says the new one.

They go with the next release, but for those of `PICKLED`: a pickle that was written before names
its class as `spmd_core.EinsumLinear`, and finds it here without a warning.
"""

import dis
import importlib
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.marks.marking import mark_sharding
from spmd_core.runtime.processes import memory_stats
from spmd_core.sharding.mesh import Mesh
from spmd_core.sharding.partition_spec import PartitionSpecLike, ShardingSpec
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def apply_sharding(t: torch.Tensor, spec: ShardingSpec) -> XLAShardedTensor:
    """`mark_sharding(t, spec)`."""
    return mark_sharding(t, spec)


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpecLike
) -> XLAShardedTensor:
    """`mark_sharding(t, mesh, partition_spec, inplace=False)`."""
    return mark_sharding(t, mesh, partition_spec, inplace=False)


def memory_info(device: int | str | torch.device | None = None) -> dict[str, int]:
    """Three of the figures of `metrics.memory_stats(device)`, under other keys."""
    found = memory_stats(device)
    return {
        "bytes_used": found["bytes_in_use"],
        "bytes_limit": found["bytes_limit"],
        "peak_bytes_used": found["peak_bytes_in_use"],
    }


@dataclass(frozen=True)
class Former:
    """Where a name went.

    Attributes:
        module: the module that has the object, or is it.
        attribute: the object's name there; None: the module itself.
        now: what to write instead.
    """

    module: str
    attribute: str | None
    now: str


# Names that are as they were, in a public module of the package.
_IN_PUBLIC_MODULES = {
    "errors": (
        *("SpmdError", "MeshError", "PartitionSpecError", "ShardError", "WrapError"),
        *("DeviceMismatchError", "NotInSpmdModeError", "UnsupportedOpError", "HostFallbackError"),
        *("IndexRangeError", "DeviceMemoryError", "ProgramError", "ProcessError"),
        *("VerificationError", "DataError", "PlanError", "PlanReadError"),
    ),
    "dtensor": (
        *("init_device_mesh", "to_device_mesh", "from_device_mesh", "partition_spec_of"),
        *("placements_of", "distribute_tensor", "distribute_module", "from_local"),
        *("parallelize_module", "loss_parallel", "Shard", "Replicate", "ColwiseParallel"),
        *("RowwiseParallel", "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput"),
        "PrepareModuleInputOutput",
    ),
    "distributed": (
        *("initialize", "coordinator_address", "process_index", "process_count"),
        *("local_process_count", "addressable_runtime_device_count", "is_master"),
        *("request_stop", "should_stop", "device_attributes", "device_type"),
    ),
    "manual": (
        *("axis_index", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
        "collective_permute",
    ),
    "debugging": (
        *("profiler", "verify", "visualize_sharding", "visualize_tensor_sharding"),
        *("versions", "Versions", "allow_execution", "is_planning"),
    ),
}

# Names of which only programs for torch_xla make use: torch-xla-compat has them, and what they name
# is private here. For each torch_xla's module: our modules, and the names.
_IN_TORCH_XLA: dict[str, dict[str, tuple[str, ...]]] = {
    "torch_xla.core.xla_model": {
        "steps.loop": ("optimizer_step", "unlazy", "RateTracker", "wait_device_ops"),
        "modules.barrier": ("optimization_barrier_",),
    },
    "torch_xla.runtime": {
        "runtime.startup": ("set_device_type", "initialize_cache"),
        "runtime.processes": ("host_index", "get_master_ip", "is_bf16_supported"),
    },
    "torch_xla": {"runtime.processes": ("real_devices",)},
    "torch_xla.experimental": {"dispatch.eager": ("eager_mode_context", "is_eager_mode")},
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": {
        "modules.fully_shard": ("SpmdFullyShardedDataParallel",),
    },
    "torch_xla.distributed.fsdp.wrap": {
        "modules.wrap_policies": (
            *("always_wrap_policy", "lambda_auto_wrap_policy", "recursive_wrap"),
            *("size_based_auto_wrap_policy", "transformer_auto_wrap_policy"),
        )
    },
    "torch_xla.distributed.spmd": {
        "runtime.processes": ("get_1d_mesh",),
        "sharding.sharding": ("ShardingType",),
        "tensor.shards": ("XLAShard",),
        "manual.shard_map": ("enable_manual_sharding", "disable_manual_sharding"),
        "modules.barrier": ("apply_backward_optimization_barrier",),
        "modules.einsum_linear": ("EinsumLinear",),
        "marks.dtensor": ("auto_policy",),
    },
}

# All others: our module, the name there, and what to write instead.
_OTHERS: dict[str, tuple[str, str | None, str]] = {
    "annotate": ("marks.marking", "constrain", "spmd_core.constrain"),
    "apply_sharding": (
        *("former_names", "apply_sharding"),
        "spmd_core.mark_sharding(tensor, sharding_spec)",
    ),
    "mark_sharding_with_gradients": (
        *("former_names", "mark_sharding_with_gradients"),
        "spmd_core.mark_sharding(tensor, mesh, spec, inplace=False)",
    ),
    "memory_info": ("former_names", "memory_info", "spmd_core.metrics.memory_stats(device)"),
    "memory_stats": (
        *("runtime.devices", "allocator_stats"),
        "spmd_core.metrics.memory_stats(device), for one device",
    ),
    "start_upload": (
        *("marks.marking", "start_upload"),
        "spmd_core.send_to_device(data, sharding_spec), which starts the upload",
    ),
    "apply_einsum_linear": (
        *("modules.einsum_linear", "apply_einsum_linear"),
        "torch_xla.distributed.spmd.apply_xla_patch_to_nn_linear, of torch-xla-compat",
    ),
    "OpSharding": (
        *("sharding.sharding", "OpSharding"),
        "what Mesh.get_op_sharding(spec) returns, or torch_xla._XLAC.OpSharding",
    ),
    "Sharding": (
        *("sharding.sharding", "Sharding"),
        "what tensor.sharding returns; spmd_core.ShardingSpec(mesh, spec) describes one",
    ),
    "ShardingReport": (
        *("marks.module_rules", "ShardingReport"),
        "what spmd_core.shard_module returns",
    ),
    "Plan": ("planner.planned", "TopologyPlan", "what spmd_core.plan returns"),
    "manual_seed": ("torch_backend.random_state", "manual_seed", "torch.manual_seed"),
    "get_rng_state": ("torch_backend.random_state", "get_rng_state", "torch.get_rng_state"),
    "set_rng_state": ("torch_backend.random_state", "set_rng_state", "torch.set_rng_state"),
    "fork_rng": (
        *("torch_backend.random_state", "fork_rng"),
        "torch.random.fork_rng(devices=[])",
    ),
    "autocast": ("torch_backend.autocast", None, 'torch.autocast("xla")'),
    "custom_ops": ("marks.custom_ops", None, "torch.ops.xla, which spmd_core registers"),
}

FORMER = {
    **{
        name: Former(f"spmd_core.{module}", name, f"spmd_core.{module}.{name}")
        for module, names in _IN_PUBLIC_MODULES.items()
        for name in names
    },
    **{
        name: Former(f"spmd_core.{module}", name, f"{place}.{name}, of torch-xla-compat")
        for place, modules in _IN_TORCH_XLA.items()
        for module, names in modules.items()
        for name in names
    },
    **{
        name: Former(f"spmd_core.{module}", attribute, now)
        for name, (module, attribute, now) in _OTHERS.items()
    },
}
"""Each former name, with its new place."""

PICKLED = frozenset(
    {"EinsumLinear", "OpSharding", "Sharding", "ShardingReport", "ShardingType"}
    | {"SpmdFullyShardedDataParallel", "XLAShard"}
)
"""Classes that pickles name as attributes of `spmd_core`."""


def look_up(name: str) -> Any:
    """The object of a former name; warns at the line that wrote the name.

    For the `__getattr__` of `spmd_core`, whose caller is that line.

    Raises:
        AttributeError: the package never had such a name.
    """
    former = FORMER.get(name)
    if former is None:
        raise AttributeError(f"module 'spmd_core' has no attribute {name!r}")
    module = importlib.import_module(former.module)
    if _is_to_be_told(name, sys._getframe(2)):
        warnings.warn(
            f"spmd_core.{name} goes with the next release; it is now {former.now}. Write that.",
            DeprecationWarning,
            stacklevel=3,
        )
    return module if former.attribute is None else getattr(module, former.attribute)


def _is_to_be_told(name: str, caller: types.FrameType) -> bool:
    """Whether the caller's code has the name.

    `from spmd_core import name` asks twice: first by importlib, which only looks whether it is
    there. A pickle's reader and writer ask by functions of C, in the middle of a call.
    """
    if caller.f_globals.get("__name__") == "importlib._bootstrap":
        return False
    operation = dis.opname[caller.f_code.co_code[caller.f_lasti]]
    return name not in PICKLED or operation in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
