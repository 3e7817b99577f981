"""The public names of `torch_xla.distributed.spmd`: meshes, shardings, manual regions."""

from torch_xla.distributed.spmd.api import auto_policy as auto_policy
from torch_xla.distributed.spmd.api import convert_to_xla_mesh as convert_to_xla_mesh
from torch_xla.distributed.spmd.api import (
    convert_to_xla_partition_spec as convert_to_xla_partition_spec,
)
from torch_xla.distributed.spmd.api import xla_distribute_module as xla_distribute_module
from torch_xla.distributed.spmd.api import xla_distribute_tensor as xla_distribute_tensor
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard as XLAShard
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor as XLAShardedTensor
from torch_xla.distributed.spmd.xla_sharding import EinsumLinear as EinsumLinear
from torch_xla.distributed.spmd.xla_sharding import HybridMesh as HybridMesh
from torch_xla.distributed.spmd.xla_sharding import MarkShardingFunction as MarkShardingFunction
from torch_xla.distributed.spmd.xla_sharding import Mesh as Mesh
from torch_xla.distributed.spmd.xla_sharding import PartitionSpec as PartitionSpec
from torch_xla.distributed.spmd.xla_sharding import ShardingSpec as ShardingSpec
from torch_xla.distributed.spmd.xla_sharding import ShardingType as ShardingType
from torch_xla.distributed.spmd.xla_sharding import XLAPatchedLinear as XLAPatchedLinear
from torch_xla.distributed.spmd.xla_sharding import _mark_manual_sharding as _mark_manual_sharding
from torch_xla.distributed.spmd.xla_sharding import (
    annotate_custom_sharding as annotate_custom_sharding,
)
from torch_xla.distributed.spmd.xla_sharding import (
    apply_backward_optimization_barrier as apply_backward_optimization_barrier,
)
from torch_xla.distributed.spmd.xla_sharding import (
    apply_xla_patch_to_nn_linear as apply_xla_patch_to_nn_linear,
)
from torch_xla.distributed.spmd.xla_sharding import clear_sharding as clear_sharding
from torch_xla.distributed.spmd.xla_sharding import (
    disable_manual_sharding as disable_manual_sharding,
)
from torch_xla.distributed.spmd.xla_sharding import enable_manual_sharding as enable_manual_sharding
from torch_xla.distributed.spmd.xla_sharding import get_1d_mesh as get_1d_mesh
from torch_xla.distributed.spmd.xla_sharding import get_global_mesh as get_global_mesh
from torch_xla.distributed.spmd.xla_sharding import mark_sharding as mark_sharding
from torch_xla.distributed.spmd.xla_sharding import (
    mark_sharding_with_gradients as mark_sharding_with_gradients,
)
from torch_xla.distributed.spmd.xla_sharding import set_global_mesh as set_global_mesh
from torch_xla.distributed.spmd.xla_sharding import shard_as as shard_as
from torch_xla.distributed.spmd.xla_sharding import unwrap_sharded_tensor as unwrap_sharded_tensor
from torch_xla.distributed.spmd.xla_sharding import wrap_as_sharded_tensor as wrap_as_sharded_tensor
from torch_xla.distributed.spmd.xla_sharding import wrap_if_sharded as wrap_if_sharded
from torch_xla.distributed.spmd.xla_sharding import (
    xla_patched_nn_linear_forward as xla_patched_nn_linear_forward,
)

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
