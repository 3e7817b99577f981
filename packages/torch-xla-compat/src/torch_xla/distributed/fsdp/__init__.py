"""FSDP by its first name, wrap policies and gradient checkpointing.

FSDP by a mesh is in `torch_xla.experimental.spmd_fully_sharded_data_parallel`.
"""

from torch_xla._upstream import refused
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
from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import (
    XlaFullyShardedDataParallel as XlaFullyShardedDataParallel,
)

consolidate_sharded_model_checkpoints = refused(
    "consolidate_sharded_model_checkpoints",
    "joins the files of processes that each saved a part, and state_dict() is whole",
    "Save state_dict() of the SPMD model: it is whole.",
)
