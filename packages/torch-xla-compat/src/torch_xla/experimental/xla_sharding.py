"""Older path of `torch_xla.distributed.spmd`, which early documents use."""

from torch_xla.distributed.spmd import *  # noqa: F403
from torch_xla.distributed.spmd import _mark_manual_sharding as _mark_manual_sharding
