"""The sharded tensor and its shards."""

from spmd_core.shards import XLAShard as XLAShard
from spmd_core.tensor import XLAShardedTensor as XLAShardedTensor
