"""Exchange of tensors with other libraries by DLPack, through host memory."""

from typing import Any

import torch
from torch.utils import dlpack

from torch_xla._upstream import refused


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """A DLPack capsule of a copy in host memory. Waits for the device.

    The memory of a device is not shared: the next program may take over a tensor's buffers.
    """
    return dlpack.to_dlpack(xla_tensor.detach().cpu())


def from_dlpack(ext_data: Any) -> torch.Tensor:
    """A tensor on the device with the values of a DLPack capsule or of an object that gives one."""
    return torch.from_dlpack(ext_data).to("xla")


from_xla_cuda_to_cuda = refused(
    "dlpack.from_xla_cuda_to_cuda",
    "shares a buffer of a CUDA device between PyTorch/XLA and torch",
    'Copy the tensor: tensor.cpu().to("cuda").',
)
