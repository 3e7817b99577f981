"""The place where the first documents found the sharded tensor."""

from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard as XLAShard
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor as XLAShardedTensor
