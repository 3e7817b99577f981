"""The refusal of tensors that are not dense: sparse, nested, quantized, mkldnn's."""

from enum import StrEnum

import torch

from spmd_core.errors import UnsupportedOpError


class RefusedLayout(StrEnum):
    """Layouts that the device does not support; the values are words of the message."""

    SPARSE = "sparse"
    NESTED = "nested"
    QUANTIZED = "quantized"
    MKLDNN = "mkldnn"


_INSTEAD = {
    RefusedLayout.SPARSE: (
        "Use dense tensors: sparse.to_dense().to('xla'), sparse=False for embeddings; "
        "torch.where and scatter choose elements."
    ),
    RefusedLayout.NESTED: (
        "Pad the sequences to one length: torch.nn.utils.rnn.pad_sequence(tensors, "
        "batch_first=True).to('xla'), with a mask."
    ),
    RefusedLayout.QUANTIZED: (
        "Use integers with a scale of your own, (x / scale).round().to(torch.int8), or "
        "torch.fake_quantize_per_tensor_affine; quantized.dequantize().to('xla') moves the values."
    ),
    RefusedLayout.MKLDNN: "Leave out to_mkldnn(), which is for kernels of the CPU.",
}

_QUANTIZED = frozenset(
    getattr(torch, name)
    for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    if hasattr(torch, name)
)


def refusal(layout: RefusedLayout, what: str) -> UnsupportedOpError:
    """The exception for an operation, named by `what`, that would make such a tensor."""
    return UnsupportedOpError(
        f"tensors of device 'xla' are dense; got {what}, which makes a {layout} tensor there. "
        f"{_INSTEAD[layout]}"
    )


def require_strided(
    layout: torch.layout | None, what: str, dtype: torch.dtype | None = None
) -> None:
    """Raises `refusal` for what was asked for, if its tensor would not be dense.

    Args:
        layout: the layout; None stands for torch.strided.
        what: names the operation.
        dtype: of the tensor.
    """
    if dtype in _QUANTIZED:
        raise refusal(RefusedLayout.QUANTIZED, f"{what} with dtype={dtype}")
    if layout not in (None, torch.strided):
        raise refusal(_kind(layout), f"{what} with layout={layout}")


def _kind(layout: torch.layout) -> RefusedLayout:
    if layout is torch.jagged:
        return RefusedLayout.NESTED
    is_mkldnn = layout is torch._mkldnn  # type: ignore[attr-defined]
    return RefusedLayout.MKLDNN if is_mkldnn else RefusedLayout.SPARSE


def require_dense(t: torch.Tensor, name: str) -> None:
    """Raises `refusal` for a tensor of the host that cannot be moved to the device.

    Args:
        t: the tensor.
        name: what the message calls it.
    """
    if t.is_nested:
        layout = RefusedLayout.NESTED
    elif t.is_quantized or t.dtype in _QUANTIZED:
        layout = RefusedLayout.QUANTIZED
    elif t.layout is not torch.strided:
        layout = _kind(t.layout)
    else:
        return
    raise refusal(layout, f"{name} of layout {t.layout} and dtype {t.dtype}")
