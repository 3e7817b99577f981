"""Context parallelism: attention over sequences that a mesh axis splits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spmd_core.errors import SpmdError
from spmd_core.manual.region import axes_of, is_local
from spmd_core.marks.along import AxisLayout, Redistribute
from spmd_core.recording.split_sequences import current
from spmd_core.runtime.devices import require_spmd
from spmd_core.sharding.mesh import Mesh, given_or_global
from spmd_core.sharding.partition_spec import Axis
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@contextmanager
def context_parallel(mesh: Mesh | None = None, axis: Axis = "context") -> Iterator[None]:
    """Inside of it, `F.scaled_dot_product_attention` takes sequences that a mesh axis splits.

    Each device keeps its queries, and keys and values go round in a ring (`ops.kernels.ring`), so
    that no device has a whole sequence. With `is_causal` all devices have the same work. Tensors
    keep their order and whole sizes; lengths need not divide. The rest of a model needs nothing but
    a mark of its input's sequence dim. A checkpoint runs its function again as it ran before.

    As a decorator it holds for a function, such as `module.forward`.

    Args:
        mesh: None: the global mesh.
        axis: of the mesh, name or number.

    Raises:
        NotInSpmdModeError: `use_spmd()` was not called.
        PartitionSpecError: the mesh lacks the axis.
        SpmdError: inside: dropout, a mask that needs a gradient, a causal mask for sequences of two
            lengths, or a manual region.
    """
    require_spmd("context_parallel")
    chosen = given_or_global(mesh, "context_parallel")
    layout = AxisLayout(chosen, axes_of(chosen, axis), -2)

    def split(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> tuple[torch.Tensor, ...]:
        _check(query, key, mask, dropout_p, is_causal)
        return tuple(Redistribute.apply(x, layout, layout) for x in (query, key, value))

    token = current.set(split)
    try:
        yield
    finally:
        current.reset(token)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    rule = "attention under context_parallel"
    if any(isinstance(x, XLAShardedTensor) and is_local(x) for x in (query, key)):
        raise SpmdError(
            f"{rule} is over whole tensors; got tensors that are local to a manual region. "
            "Leave the region first, or exchange keys with collectives."
        )
    if dropout_p:
        raise SpmdError(
            f"{rule} has no dropout; got dropout_p={dropout_p}. "
            "Set the probability to 0, or leave the context."
        )
    if mask is not None and mask.requires_grad:
        raise SpmdError(
            f"{rule} has no gradient of its mask; got attn_mask.requires_grad=True. "
            "Pass attn_mask.detach(), or leave the context."
        )
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise SpmdError(
            f"causal {rule} has as many keys as queries; got {query.shape[-2]} queries and "
            f"{key.shape[-2]} keys. Pass a mask instead, or leave the context."
        )
