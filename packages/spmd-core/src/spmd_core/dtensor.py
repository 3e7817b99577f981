"""DTensor's words: device meshes, placements and styles of tensor parallelism, as torch has them.

torch's own placements and styles are imported when they are asked for, as their import takes a
second.
"""

import typing

from spmd_core.marks.device_mesh import from_device_mesh as from_device_mesh
from spmd_core.marks.device_mesh import init_device_mesh as init_device_mesh
from spmd_core.marks.device_mesh import to_device_mesh as to_device_mesh
from spmd_core.marks.dtensor import distribute_module as distribute_module
from spmd_core.marks.dtensor import distribute_tensor as distribute_tensor
from spmd_core.marks.dtensor import from_local as from_local
from spmd_core.marks.placements import partition_spec_of as partition_spec_of
from spmd_core.marks.placements import placements_of as placements_of
from spmd_core.modules.tensor_parallel import loss_parallel as loss_parallel
from spmd_core.modules.tensor_parallel import parallelize_module as parallelize_module

if typing.TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "from_device_mesh",
    "from_local",
    "init_device_mesh",
    "loss_parallel",
    "parallelize_module",
    "partition_spec_of",
    "placements_of",
    "to_device_mesh",
]


def __getattr__(name: str) -> typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'spmd_core.dtensor' has no attribute {name!r}")
    from torch.distributed import tensor  # noqa: PLC0415
    from torch.distributed.tensor import parallel  # noqa: PLC0415

    return getattr(tensor if name in ("Shard", "Replicate") else parallel, name)
