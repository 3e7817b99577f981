"""PyTorch SPMD on stock torch and jaxlib: mark a few tensors, run one program on every device."""

from spmd_core import debugging as debugging
from spmd_core import metrics as metrics
from spmd_core.config import config as config
from spmd_core.config import strict as strict
from spmd_core.debugging import profiler as profiler
from spmd_core.debugging.visualize import visualize_sharding as visualize_sharding
from spmd_core.debugging.visualize import visualize_tensor_sharding as visualize_tensor_sharding
from spmd_core.dispatch.eager import eager_mode as eager_mode
from spmd_core.dispatch.eager import eager_mode_context as eager_mode_context
from spmd_core.dispatch.eager import is_eager_mode as is_eager_mode
from spmd_core.errors import DataError as DataError
from spmd_core.errors import DeviceMemoryError as DeviceMemoryError
from spmd_core.errors import DeviceMismatchError as DeviceMismatchError
from spmd_core.errors import HostFallbackError as HostFallbackError
from spmd_core.errors import MeshError as MeshError
from spmd_core.errors import NotInSpmdModeError as NotInSpmdModeError
from spmd_core.errors import PartitionSpecError as PartitionSpecError
from spmd_core.errors import ProgramError as ProgramError
from spmd_core.errors import ShardError as ShardError
from spmd_core.errors import SpmdError as SpmdError
from spmd_core.errors import UnsupportedOpError as UnsupportedOpError
from spmd_core.errors import WrapError as WrapError
from spmd_core.manual.collectives import all_gather as all_gather
from spmd_core.manual.collectives import all_reduce as all_reduce
from spmd_core.manual.collectives import all_to_all as all_to_all
from spmd_core.manual.collectives import collective_permute as collective_permute
from spmd_core.manual.collectives import reduce_scatter as reduce_scatter
from spmd_core.manual.shard_map import axis_index as axis_index
from spmd_core.manual.shard_map import disable_manual_sharding as disable_manual_sharding
from spmd_core.manual.shard_map import enable_manual_sharding as enable_manual_sharding
from spmd_core.manual.shard_map import shard_map as shard_map
from spmd_core.marks import custom_ops as custom_ops
from spmd_core.marks.device_mesh import from_device_mesh as from_device_mesh
from spmd_core.marks.device_mesh import init_device_mesh as init_device_mesh
from spmd_core.marks.device_mesh import to_device_mesh as to_device_mesh
from spmd_core.marks.dtensor import auto_policy as auto_policy
from spmd_core.marks.dtensor import distribute_module as distribute_module
from spmd_core.marks.dtensor import distribute_tensor as distribute_tensor
from spmd_core.marks.dtensor import from_local as from_local
from spmd_core.marks.marking import annotate as annotate
from spmd_core.marks.marking import apply_sharding as apply_sharding
from spmd_core.marks.marking import clear_sharding as clear_sharding
from spmd_core.marks.marking import mark_sharding as mark_sharding
from spmd_core.marks.marking import mark_sharding_with_gradients as mark_sharding_with_gradients
from spmd_core.marks.marking import shard_as as shard_as
from spmd_core.marks.marking import start_upload as start_upload
from spmd_core.marks.marking import sync as sync
from spmd_core.marks.module_rules import ShardingReport as ShardingReport
from spmd_core.marks.module_rules import shard_module as shard_module
from spmd_core.marks.placements import partition_spec_of as partition_spec_of
from spmd_core.marks.placements import placements_of as placements_of
from spmd_core.modules.barrier import (
    apply_backward_optimization_barrier as apply_backward_optimization_barrier,
)
from spmd_core.modules.barrier import optimization_barrier_ as optimization_barrier_
from spmd_core.modules.checkpointing import (  # noqa: F401 - pickles name it here
    CheckpointedForward as _CheckpointedForward,
)
from spmd_core.modules.checkpointing import checkpoint_module as checkpoint_module
from spmd_core.modules.einsum_linear import EinsumLinear as EinsumLinear
from spmd_core.modules.einsum_linear import apply_einsum_linear as apply_einsum_linear
from spmd_core.modules.fully_shard import (
    SpmdFullyShardedDataParallel as SpmdFullyShardedDataParallel,
)
from spmd_core.modules.fully_shard import fully_shard as fully_shard
from spmd_core.modules.wrap_policies import always_wrap_policy as always_wrap_policy
from spmd_core.modules.wrap_policies import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from spmd_core.modules.wrap_policies import recursive_wrap as recursive_wrap
from spmd_core.modules.wrap_policies import (
    size_based_auto_wrap_policy as size_based_auto_wrap_policy,
)
from spmd_core.modules.wrap_policies import (
    transformer_auto_wrap_policy as transformer_auto_wrap_policy,
)
from spmd_core.recording.jax_calls import call_jax as call_jax
from spmd_core.recording.jax_calls import from_jax as from_jax
from spmd_core.recording.jax_calls import to_jax as to_jax
from spmd_core.runtime.devices import device_attributes as device_attributes
from spmd_core.runtime.devices import global_runtime_device_count as global_runtime_device_count
from spmd_core.runtime.devices import is_spmd as is_spmd
from spmd_core.runtime.devices import memory_stats as memory_stats
from spmd_core.runtime.devices import simulate as simulate
from spmd_core.runtime.devices import use_spmd as use_spmd
from spmd_core.runtime.hybrid_mesh import HybridMesh as HybridMesh
from spmd_core.runtime.processes import (
    addressable_runtime_device_count as addressable_runtime_device_count,
)
from spmd_core.runtime.processes import get_1d_mesh as get_1d_mesh
from spmd_core.runtime.processes import get_master_ip as get_master_ip
from spmd_core.runtime.processes import host_index as host_index
from spmd_core.runtime.processes import is_bf16_supported as is_bf16_supported
from spmd_core.runtime.processes import is_master as is_master
from spmd_core.runtime.processes import local_process_count as local_process_count
from spmd_core.runtime.processes import memory_info as memory_info
from spmd_core.runtime.processes import process_count as process_count
from spmd_core.runtime.processes import process_index as process_index
from spmd_core.runtime.processes import real_devices as real_devices
from spmd_core.runtime.startup import coordinator_address as coordinator_address
from spmd_core.runtime.startup import device_type as device_type
from spmd_core.runtime.startup import initialize as initialize
from spmd_core.runtime.startup import initialize_cache as initialize_cache
from spmd_core.runtime.startup import set_device_type as set_device_type
from spmd_core.sharding.mesh import Mesh as Mesh
from spmd_core.sharding.mesh import _rebuild_mesh as _rebuild_mesh
from spmd_core.sharding.mesh import get_global_mesh as get_global_mesh
from spmd_core.sharding.mesh import parse_mesh as parse_mesh
from spmd_core.sharding.mesh import set_global_mesh as set_global_mesh
from spmd_core.sharding.partition_spec import PartitionSpec as PartitionSpec
from spmd_core.sharding.partition_spec import ShardingSpec as ShardingSpec
from spmd_core.sharding.sharding import OpSharding as OpSharding
from spmd_core.sharding.sharding import Sharding as Sharding
from spmd_core.sharding.sharding import ShardingType as ShardingType
from spmd_core.steps.closures import add_step_closure as add_step_closure
from spmd_core.steps.closures import wait_for_closures as wait_for_closures
from spmd_core.steps.compile import allow_execution as allow_execution
from spmd_core.steps.compile import compile as compile
from spmd_core.steps.compile import step as step
from spmd_core.steps.loop import RateTracker as RateTracker
from spmd_core.steps.loop import optimizer_step as optimizer_step
from spmd_core.steps.loop import unlazy as unlazy
from spmd_core.steps.loop import wait_device_ops as wait_device_ops
from spmd_core.steps.structures import save as save
from spmd_core.steps.structures import send_to_device as send_to_device
from spmd_core.steps.structures import to_cpu as to_cpu
from spmd_core.tensor.sharded_tensor import XLAShardedTensor as XLAShardedTensor
from spmd_core.tensor.sharded_tensor import _rebuild_parameter as _rebuild_parameter
from spmd_core.tensor.shards import XLAShard as XLAShard
from spmd_core.torch_backend import autocast as autocast
from spmd_core.torch_backend.random_state import fork_rng as fork_rng
from spmd_core.torch_backend.random_state import get_rng_state as get_rng_state
from spmd_core.torch_backend.random_state import manual_seed as manual_seed
from spmd_core.torch_backend.random_state import set_rng_state as set_rng_state
from spmd_core.torch_backend.registration import device as device
