"""Helpers for FSDP: wrap policies and gradient checkpointing.

FSDP itself is in `torch_xla.experimental.spmd_fully_sharded_data_parallel`. The older FSDP over
several processes is not available.
"""

from typing import Any

from torch_xla._upstream import refuse, refused
from torch_xla.distributed.fsdp.utils import checkpoint_module as checkpoint_module
from torch_xla.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch_xla.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch_xla.distributed.fsdp.wrap import recursive_wrap as recursive_wrap
from torch_xla.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy as size_based_auto_wrap_policy,
)
from torch_xla.distributed.fsdp.wrap import (
    transformer_auto_wrap_policy as transformer_auto_wrap_policy,
)

_REASON = "shards one process's replica, and SPMD has one process with all devices"
_INSTEAD = (
    "Use torch_xla.experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel."
)


class XlaFullyShardedDataParallel:
    """Not available: the name can be imported; the constructor raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("XlaFullyShardedDataParallel", _REASON, _INSTEAD)


consolidate_sharded_model_checkpoints = refused(
    "consolidate_sharded_model_checkpoints",
    _REASON,
    "Save state_dict() of the SPMD model: it is whole.",
)
