"""FSDP by sharding annotations ("FSDPv2")."""

from collections.abc import Callable
from typing import Any

from torch import nn

import spmd_core as spmd
from spmd_core.modules import fully_shard


class SpmdFullyShardedDataParallel(fully_shard.SpmdFullyShardedDataParallel):
    """FSDP by marks: a module whose parameters live in shards, with torch_xla's arguments.

    Submodules that the policy selects become units of this class.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: spmd.Mesh | None = None,
        *,
        shard_output: Callable[..., Any] | None = None,
        auto_wrap_policy: Any = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
        **kwargs: Any,
    ) -> None:
        chosen = spmd.get_global_mesh() if mesh is None else mesh
        if (
            extra_data_axis is not None
            and isinstance(chosen, spmd.Mesh)
            and extra_data_axis not in (chosen.axis_names or ())
        ):
            raise ValueError(
                f"The provided {extra_data_axis} axis is not in the mesh: extra_data_axis is one "
                f"of its axes; got {chosen!r}. Name one of them."
            )
        super().__init__(
            module,
            mesh,
            shard_output=shard_output,
            auto_wrap_policy=auto_wrap_policy,
            auto_wrapper_callable=auto_wrapper_callable or SpmdFullyShardedDataParallel,
            extra_data_axis=extra_data_axis,
            **kwargs,
        )
