"""The place where the first documents found `torch_xla.distributed.spmd`."""

from torch_xla.distributed.spmd import *  # noqa: F403
from torch_xla.distributed.spmd import _mark_manual_sharding as _mark_manual_sharding
