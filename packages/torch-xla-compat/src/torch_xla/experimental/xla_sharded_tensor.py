"""Older path of `torch_xla.distributed.spmd.xla_sharded_tensor`, which early documents use."""

from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard as XLAShard
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor as XLAShardedTensor
