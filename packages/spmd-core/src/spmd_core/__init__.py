"""PyTorch SPMD on stock torch and jaxlib: mark a few tensors, run one program on every device."""

import importlib
import typing

from spmd_core import command_line as _command_line
from spmd_core.checkpoint_options import check_command_line as _check_checkpoint
from spmd_core.planner.options import check_command_line as _check_plan

if _command_line.is_any():
    _check_plan()  # before the imports below, which take seconds
    _check_checkpoint()

# isort: split
from spmd_core import (
    control_flow,
    debugging,
    distributed,
    dtensor,
    errors,
    manual,
    metrics,
    releases,
)
from spmd_core import former_names as _former_names
from spmd_core.auto import registration as _automatic
from spmd_core.auto.registration import use_spmd
from spmd_core.config import config, strict
from spmd_core.control_flow import torch_functions as _torch_functions
from spmd_core.control_flow.scans import scan
from spmd_core.dispatch.eager import eager_mode
from spmd_core.dynamo import registration as _dynamo
from spmd_core.manual.shard_map import shard_map
from spmd_core.marks import custom_ops as _custom_ops
from spmd_core.marks.marking import clear_sharding, constrain, mark_sharding, shard_as, sync
from spmd_core.marks.module_rules import shard_module
from spmd_core.marks.process_data import from_process_local
from spmd_core.modules import torch_data_parallel as _torch_data_parallel
from spmd_core.modules import torch_dtensor as _torch_dtensor
from spmd_core.modules.checkpointing import CheckpointedForward as _CheckpointedForward
from spmd_core.modules.checkpointing import checkpoint_module
from spmd_core.modules.context_parallel import context_parallel
from spmd_core.modules.document_attention import document_attention
from spmd_core.modules.fully_shard import fully_shard
from spmd_core.modules.linear_cross_entropy import linear_cross_entropy
from spmd_core.modules.offloading import save_on_host
from spmd_core.modules.pipeline import Pipeline, pipeline
from spmd_core.modules.pipeline_loss import pipeline_loss
from spmd_core.modules.scan_layers import scan_layers
from spmd_core.modules.scan_model import scan_model
from spmd_core.planner.plan import plan
from spmd_core.program.lost import roll_back
from spmd_core.recording.jax_calls import call_jax, from_jax, to_jax
from spmd_core.runtime.devices import global_runtime_device_count, is_spmd, simulate
from spmd_core.runtime.hybrid_mesh import HybridMesh
from spmd_core.runtime.preemption import on_preemption
from spmd_core.sharding.mesh import (
    Mesh,
    _rebuild_mesh,
    get_global_mesh,
    set_global_mesh,
)
from spmd_core.sharding.mesh_text import parse_mesh
from spmd_core.sharding.partition_spec import PartitionSpec, ShardingSpec
from spmd_core.steps.closures import add_step_closure, wait_for_closures
from spmd_core.steps.compile import compile, step
from spmd_core.steps.structures import save, send_to_device, to_cpu
from spmd_core.steps.weight_saving import save_safetensors
from spmd_core.tensor.sharded_tensor import XLAShardedTensor, _rebuild_parameter
from spmd_core.torch_backend import autocast as _autocast
from spmd_core.torch_backend.registration import device
from spmd_core.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from spmd_core.auto.auto_shard import auto_shard
    from spmd_core.checkpoint.manager import CheckpointManager
    from spmd_core.steps.weight_loading import load_safetensors

releases.warn_if_untested()
_torch_data_parallel.install()
_torch_dtensor.install()
_dynamo.install()
_torch_functions.install()
_automatic.install()

# Imported for what they register: torch.ops.xla's operators, and torch.autocast("xla").
_REGISTERED = (_custom_ops, _autocast)
# A pickle finds here what it rebuilds: the file behind a name may move, the name may not.
_PICKLED = (_rebuild_mesh, _rebuild_parameter, _CheckpointedForward)

# The public names, in the groups in which a user meets them; at most 60.
__all__ = [  # noqa: RUF022 - not by alphabet
    # Devices, and SPMD mode over them
    "simulate",
    "use_spmd",
    "is_spmd",
    "device",
    "global_runtime_device_count",
    # Meshes
    "Mesh",
    "HybridMesh",
    "parse_mesh",
    "set_global_mesh",
    "get_global_mesh",
    # Marks: where a tensor's blocks live
    "mark_sharding",
    "constrain",
    "clear_sharding",
    "shard_as",
    "shard_module",
    "from_process_local",
    "PartitionSpec",
    "ShardingSpec",
    "XLAShardedTensor",
    # Steps
    "sync",
    "roll_back",
    "step",
    "compile",
    "add_step_closure",
    "wait_for_closures",
    "eager_mode",
    # Modules, and functions of them
    "fully_shard",
    "pipeline",
    "pipeline_loss",
    "Pipeline",
    "scan_layers",
    "scan_model",
    "scan",
    "context_parallel",
    "document_attention",
    "linear_cross_entropy",
    "checkpoint_module",
    "save_on_host",
    "shard_map",
    # Loading and saving
    "CheckpointManager",
    "load_safetensors",
    "save_safetensors",
    "save",
    "send_to_device",
    "to_cpu",
    "on_preemption",
    # jax
    "call_jax",
    "to_jax",
    "from_jax",
    # Shardings that are found, and plans for devices that are not there
    "auto_shard",
    "plan",
    # Settings
    "config",
    "strict",
    # Modules: exceptions; DTensor's words; several processes; collectives inside shard_map; loops
    # and branches on the device; looking inside; figures of what ran
    "errors",
    "dtensor",
    "distributed",
    "manual",
    "control_flow",
    "debugging",
    "metrics",
]


# Names whose modules import packages that not every installation has, or that take long to import.
_OF_EXTRAS = {
    "auto_shard": "spmd_core.auto.auto_shard",
    "CheckpointManager": "spmd_core.checkpoint.manager",
    "load_safetensors": "spmd_core.steps.weight_loading",
}


def __getattr__(name: str) -> typing.Any:
    if name in _OF_EXTRAS:
        return getattr(importlib.import_module(_OF_EXTRAS[name]), name)
    return _former_names.look_up(name)
