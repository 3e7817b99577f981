"""`XLAShardedTensor`, the sharded tensor, and `XLAShard`, its shards."""

from spmd_core.tensor.sharded_tensor import XLAShardedTensor as XLAShardedTensor
from spmd_core.tensor.shards import XLAShard as XLAShard
