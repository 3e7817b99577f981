"""Checkpoints of sharded tensors by torch.distributed.checkpoint: planners and a manager."""

from torch_xla.experimental.distributed_checkpoint.manager import (
    CheckpointManager as CheckpointManager,
)
from torch_xla.experimental.distributed_checkpoint.planners import (
    SPMDLoadPlanner as SPMDLoadPlanner,
)
from torch_xla.experimental.distributed_checkpoint.planners import (
    SPMDSavePlanner as SPMDSavePlanner,
)
from torch_xla.experimental.distributed_checkpoint.util import prime_optimizer as prime_optimizer
