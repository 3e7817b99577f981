"""PyTorch SPMD on stock torch and jaxlib: mark a few tensors, run one program on every device."""

import sys
import typing

from spmd_core.planner.options import check_command_line as _check_command_line

if sys.argv[:1] == ["-m"]:  # while Python imports the package of the module that it is to run
    _check_command_line()  # before the imports below, which take seconds

# isort: split
from spmd_core import (
    debugging,
    distributed,
    dtensor,
    errors,
    former_names,
    manual,
    metrics,
    releases,
)
from spmd_core.config import config, strict
from spmd_core.debugging import profiler
from spmd_core.debugging.visualize import visualize_sharding, visualize_tensor_sharding
from spmd_core.dispatch.eager import eager_mode, eager_mode_context, is_eager_mode
from spmd_core.errors import (
    DataError,
    DeviceMemoryError,
    DeviceMismatchError,
    HostFallbackError,
    IndexRangeError,
    MeshError,
    NotInSpmdModeError,
    PartitionSpecError,
    PlanError,
    PlanReadError,
    ProcessError,
    ProgramError,
    ShardError,
    SpmdError,
    UnsupportedOpError,
    VerificationError,
    WrapError,
)
from spmd_core.manual.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    reduce_scatter,
)
from spmd_core.manual.shard_map import (
    axis_index,
    disable_manual_sharding,
    enable_manual_sharding,
    shard_map,
)
from spmd_core.marks import custom_ops
from spmd_core.marks.device_mesh import from_device_mesh, init_device_mesh, to_device_mesh
from spmd_core.marks.dtensor import auto_policy, distribute_module, distribute_tensor, from_local
from spmd_core.marks.marking import (
    clear_sharding,
    constrain,
    mark_sharding,
    shard_as,
    start_upload,
    sync,
)
from spmd_core.marks.module_rules import ShardingReport, shard_module
from spmd_core.marks.placements import partition_spec_of, placements_of
from spmd_core.marks.process_data import from_process_local
from spmd_core.modules import torch_data_parallel as _torch_data_parallel
from spmd_core.modules.barrier import apply_backward_optimization_barrier, optimization_barrier_
from spmd_core.modules.checkpointing import CheckpointedForward as _CheckpointedForward
from spmd_core.modules.checkpointing import checkpoint_module
from spmd_core.modules.context_parallel import context_parallel
from spmd_core.modules.document_attention import document_attention
from spmd_core.modules.einsum_linear import EinsumLinear, apply_einsum_linear
from spmd_core.modules.fully_shard import SpmdFullyShardedDataParallel, fully_shard
from spmd_core.modules.linear_cross_entropy import linear_cross_entropy
from spmd_core.modules.offloading import save_on_host
from spmd_core.modules.pipeline import Pipeline, pipeline
from spmd_core.modules.pipeline_loss import pipeline_loss
from spmd_core.modules.tensor_parallel import loss_parallel, parallelize_module
from spmd_core.modules.wrap_policies import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from spmd_core.planner.plan import is_planning, plan
from spmd_core.planner.planned import Plan
from spmd_core.program.execution import roll_back, verify
from spmd_core.recording.jax_calls import call_jax, from_jax, to_jax
from spmd_core.releases import Versions, versions
from spmd_core.runtime.devices import (
    device_attributes,
    global_runtime_device_count,
    is_spmd,
    simulate,
    use_spmd,
)
from spmd_core.runtime.hybrid_mesh import HybridMesh
from spmd_core.runtime.processes import (
    addressable_runtime_device_count,
    get_1d_mesh,
    get_master_ip,
    host_index,
    is_bf16_supported,
    is_master,
    local_process_count,
    process_count,
    process_index,
    real_devices,
)
from spmd_core.runtime.startup import (
    coordinator_address,
    device_type,
    initialize,
    initialize_cache,
    set_device_type,
)
from spmd_core.runtime.stopping import request_stop, should_stop
from spmd_core.sharding.mesh import (
    Mesh,
    _rebuild_mesh,
    get_global_mesh,
    parse_mesh,
    set_global_mesh,
)
from spmd_core.sharding.partition_spec import PartitionSpec, ShardingSpec
from spmd_core.sharding.sharding import OpSharding, Sharding, ShardingType
from spmd_core.steps.closures import add_step_closure, wait_for_closures
from spmd_core.steps.compile import allow_execution, compile, step
from spmd_core.steps.loop import RateTracker, optimizer_step, unlazy, wait_device_ops
from spmd_core.steps.structures import save, send_to_device, to_cpu
from spmd_core.steps.weight_saving import save_safetensors
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, _rebuild_parameter
from spmd_core.tensor.shards import XLAShard
from spmd_core.torch_backend import autocast
from spmd_core.torch_backend.random_state import fork_rng, get_rng_state, manual_seed, set_rng_state
from spmd_core.torch_backend.registration import device

if typing.TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    from spmd_core.steps.weight_loading import load_safetensors

releases.warn_if_untested()
_torch_data_parallel.install()

# A pickle finds here what it rebuilds: the file behind a name may move, the name may not.
_PICKLED = (_rebuild_mesh, _rebuild_parameter, _CheckpointedForward)

# The public names, in the groups in which a user meets them.
__all__ = [  # noqa: RUF022 - not by alphabet
    # Devices, and SPMD mode over them
    "simulate",
    "use_spmd",
    "is_spmd",
    "device",
    "device_type",
    "set_device_type",
    "global_runtime_device_count",
    "addressable_runtime_device_count",
    "real_devices",
    "device_attributes",
    "is_bf16_supported",
    # Meshes
    "Mesh",
    "HybridMesh",
    "parse_mesh",
    "get_1d_mesh",
    "set_global_mesh",
    "get_global_mesh",
    # Marks: where a tensor's blocks live
    "mark_sharding",
    "constrain",
    "shard_as",
    "clear_sharding",
    "from_process_local",
    "start_upload",
    "shard_module",
    "ShardingReport",
    # What a mark is, and what it is on
    "PartitionSpec",
    "ShardingSpec",
    "Sharding",
    "ShardingType",
    "OpSharding",
    "XLAShardedTensor",
    "XLAShard",
    # Training loops
    "sync",
    "roll_back",
    "step",
    "compile",
    "allow_execution",
    "optimizer_step",
    "add_step_closure",
    "wait_for_closures",
    "wait_device_ops",
    "unlazy",
    "RateTracker",
    "save",
    "send_to_device",
    "to_cpu",
    "load_safetensors",
    "save_safetensors",
    "autocast",
    # Modules: tensor parallelism, FSDP, pipelines, checkpointing, offloading, barriers
    "parallelize_module",
    "loss_parallel",
    "linear_cross_entropy",
    "context_parallel",
    "document_attention",
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "PrepareModuleInputOutput",
    "Shard",
    "Replicate",
    "fully_shard",
    "SpmdFullyShardedDataParallel",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "recursive_wrap",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "pipeline",
    "pipeline_loss",
    "Pipeline",
    "checkpoint_module",
    "save_on_host",
    "optimization_barrier_",
    "apply_backward_optimization_barrier",
    "EinsumLinear",
    "apply_einsum_linear",
    # Code that is one device's own
    "shard_map",
    "enable_manual_sharding",
    "disable_manual_sharding",
    "axis_index",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    # DTensor's words
    "init_device_mesh",
    "to_device_mesh",
    "from_device_mesh",
    "partition_spec_of",
    "placements_of",
    "distribute_tensor",
    "distribute_module",
    "from_local",
    "auto_policy",
    "custom_ops",
    # jax
    "call_jax",
    "to_jax",
    "from_jax",
    # Random numbers
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
    "fork_rng",
    # Several processes
    "initialize",
    "initialize_cache",
    "coordinator_address",
    "process_index",
    "process_count",
    "local_process_count",
    "host_index",
    "is_master",
    "get_master_ip",
    "request_stop",
    "should_stop",
    # Modules: each with its own names
    "distributed",
    "dtensor",
    "errors",
    "manual",
    # Looking inside
    "debugging",
    "metrics",
    "profiler",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "verify",
    "eager_mode",
    "eager_mode_context",
    "is_eager_mode",
    "versions",
    "Versions",
    # Settings
    "config",
    "strict",
    # Errors
    "SpmdError",
    "MeshError",
    "PartitionSpecError",
    "ShardError",
    "WrapError",
    "DeviceMismatchError",
    "NotInSpmdModeError",
    "UnsupportedOpError",
    "HostFallbackError",
    "IndexRangeError",
    "DeviceMemoryError",
    "ProgramError",
    "ProcessError",
    "VerificationError",
    "DataError",
    "PlanError",
    "PlanReadError",
    # Plans for devices that are not there
    "Plan",
    "is_planning",
    "plan",
]

# torch's placements and styles of tensor parallelism. Their import takes a second, which only
# programs that use them should pay.
_FROM_TORCH = (
    *("Shard", "Replicate", "ColwiseParallel", "RowwiseParallel", "SequenceParallel"),
    *("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"),
)


def __getattr__(name: str) -> typing.Any:
    if name == "load_safetensors":  # needs a package that not every installation has
        from spmd_core.steps.weight_loading import load_safetensors  # noqa: PLC0415

        return load_safetensors
    if name not in _FROM_TORCH:
        return former_names.look_up(name)
    from torch.distributed import tensor  # noqa: PLC0415
    from torch.distributed.tensor import parallel  # noqa: PLC0415

    return getattr(tensor if name in ("Shard", "Replicate") else parallel, name)
