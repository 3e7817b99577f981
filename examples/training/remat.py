"""Recomputes a block's activations in backward, but for those that a policy keeps."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import spmd_core as spmd
from examples.training.choices import REMAT_POLICIES


def recompute(blocks: Iterable[nn.Module], policy: str) -> None:
    """Makes each block run its forward again in backward, in place. Call it before sharding.

    Args:
        blocks: modules on device `xla`.
        policy: "none" keeps everything and changes nothing; else a key of `REMAT_POLICIES`.
    """
    if policy == "none":
        return
    kept = REMAT_POLICIES[policy]
    context_fn = partial(create_selective_checkpoint_contexts, partial(_decide, kept))
    for block in blocks:
        spmd.checkpoint_module(
            block, context_fn=context_fn if kept else None, on_host=policy == "offload"
        )


def _decide(
    kept: tuple[str, ...], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    is_kept = any(name in str(op) for name in kept)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
