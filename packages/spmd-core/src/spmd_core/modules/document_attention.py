"""Attention within the documents of packed sequences, without a mask of all queries and keys."""

import torch
import torch.nn.functional as F

from spmd_core.arguments import checked, require_kind
from spmd_core.dispatch.composite import explicit_mask, may_record_attention, recorded_attention
from spmd_core.errors import SpmdError
from spmd_core.ops.attention import is_documents
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


@checked(dropout_p=0)
def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` in which a query attends to keys of its own document alone.

    On the device, kernels compare the ids block by block: the platform's if they take ids (TPUs'
    splash attention, where they are segment ids; not cuDNN's), else this project's. No array of
    (rows, rows) exists, in forward or backward, nor under `context_parallel`. A second derivative
    (`create_graph=True`) computes all scores. Tensors of other devices, and torch's other backends
    (`sdpa_kernel`), get an explicit mask. Does not wait.

    Args:
        query: (batch, heads, rows, dim), floating-point.
        key: (batch, heads of keys, rows, dim).
        value: (batch, heads of keys, rows, value dim).
        document_ids: (batch, rows), integers on the query's device. Equal ids are one document;
            padding may have any id.
        dropout_p: the probability that a weight is dropped.
        is_causal: whether row i attends to rows up to i alone.
        scale: the factor of the products; None: 1 / sqrt(dim).
        enable_gqa: whether several heads of queries share a head of keys.

    Returns:
        (batch, heads, rows, value dim), in the query's dtype.

    Raises:
        SpmdError: the ids are no integers, or do not fit the rows.
        RuntimeError: what torch's function raises.

    Example:
        >>> x = torch.eye(4)[None, None]
        >>> document_attention(x, x, x, torch.tensor([[0, 0, 1, 1]]))[0, 0].count_nonzero(1)
        tensor([1, 2, 1, 2])
    """
    _check(query, key, document_ids)
    given = (query, key, value, document_ids)
    if may_record_attention() and all(x.__class__ is XLAShardedTensor for x in given):
        if torch.is_autocast_enabled("xla"):
            # Torch's policy for the function, which is registered for torch's own operation.
            dtype = torch.get_autocast_dtype("xla")
            query, key, value = (
                x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value)
            )
        return recorded_attention(
            query, key, value, document_ids, dropout_p, is_causal, scale, enable_gqa
        )
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        explicit_mask(document_ids, is_causal),
        dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _check(query: torch.Tensor, key: torch.Tensor, ids: torch.Tensor) -> None:
    for name, given in (("query", query), ("key", key), ("document_ids", ids)):
        require_kind(name, given, torch.Tensor, write="a tensor on device 'xla'")
    if not is_documents(ids.dtype):
        raise SpmdError(
            f"document_ids are integers; got {ids.dtype}. Number the documents, and convert with "
            ".to(torch.int32)."
        )
    rows = query.shape[-2:-1]
    if query.dim() != 4 or key.shape[-2:-1] != rows or ids.shape != (query.shape[0], *rows):
        raise SpmdError(
            "document_attention takes queries and keys of (batch, heads, rows, dim), of equally "
            f"many rows, with document_ids of (batch, rows); got query {tuple(query.shape)}, key "
            f"{tuple(key.shape)} and document_ids {tuple(ids.shape)}. Give each row its id; for "
            "other shapes use F.scaled_dot_product_attention with a mask."
        )
