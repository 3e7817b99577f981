"""Handlers of operations that make sparse, nested, quantized and mkldnn tensors: they refuse.

Otherwise the host would compute a result that cannot be stored on the device.
"""

from typing import Any, NoReturn

import torch

from spmd_core.ops import registry
from spmd_core.recording import schema
from spmd_core.recording.calls import Handler, functional_handler
from spmd_core.recording.layouts import RefusedLayout, refusal

_MAKERS = {
    RefusedLayout.SPARSE: (
        "_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
        "sparse_coo_tensor", "_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors", "sparse_compressed_tensor",
        "_sparse_compressed_tensor_unsafe", "_sparse_compressed_tensor_with_dims",
        "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
        "sparse_mask",
    ),
    RefusedLayout.NESTED: (
        "_nested_tensor_from_tensor_list", "_nested_tensor_from_mask", "_nested_from_padded",
        "_nested_view_from_buffer", "_nested_view_from_buffer_copy", "_nested_view_from_jagged",
        "_nested_view_from_jagged_copy",
    ),
    RefusedLayout.QUANTIZED: (
        "quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel",
        "_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor",
    ),
    RefusedLayout.MKLDNN: ("to_mkldnn",),
}  # fmt: skip


def _refusing(layout: RefusedLayout, func: torch._ops.OpOverload) -> Handler:
    def handler(args: Any, kwargs: dict[str, Any]) -> NoReturn:
        raise refusal(layout, func.name())

    return handler


def _dense_bags(func: torch._ops.OpOverload) -> Handler:
    """Records the gradient of an embedding bag, unless it is to be sparse."""
    lowering = registry.find_lowering(func)
    assert lowering is not None
    record, position = functional_handler(lowering), schema.of(func).names.index("sparse")

    def handler(args: Any, kwargs: dict[str, Any]) -> Any:
        if args[position]:
            raise refusal(RefusedLayout.SPARSE, f"{func.name()} with sparse=True")
        return record(args, kwargs)

    return handler


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of an operation; none if this torch lacks it."""
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads()]


HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    func: _refusing(layout, func)
    for layout, names in _MAKERS.items()
    for name in names
    for func in _overloads(name)
}
# Handlers of operations that are refused for some arguments only.
PARTIAL_HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    func: _dense_bags(func) for func in _overloads("_embedding_bag_backward")
}
