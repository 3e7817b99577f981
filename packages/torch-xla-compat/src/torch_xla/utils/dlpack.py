"""Exchange of tensors with other libraries by DLPack, through host memory."""

from typing import Any

import torch
from torch.utils import dlpack

from spmd_core.arguments import require_kind
from torch_xla._upstream import refused


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """A DLPack capsule of a copy in host memory. Waits for the device.

    The memory of a device is not shared: the next program may take over a tensor's buffers.
    TypeError for what is no tensor.
    """
    require_kind("xla_tensor", xla_tensor, torch.Tensor, write="a tensor")
    return dlpack.to_dlpack(xla_tensor.detach().cpu())


def from_dlpack(ext_data: Any) -> torch.Tensor:
    """A tensor on the device with the values of a DLPack capsule or of an object that gives one.

    Raises:
        TypeError: `ext_data` is neither.
    """
    if not hasattr(ext_data, "__dlpack__") and type(ext_data).__name__ != "PyCapsule":
        raise TypeError(
            "ext_data is a DLPack capsule, or an array or tensor of another library; got "
            f"{ext_data!r}, of type {type(ext_data).__name__}. Write for instance "
            "from_dlpack(numpy_array)."
        )
    return torch.from_dlpack(ext_data).to("xla")


from_xla_cuda_to_cuda = refused(
    "dlpack.from_xla_cuda_to_cuda",
    "shares a buffer of a CUDA device between PyTorch/XLA and torch",
    'Copy the tensor: tensor.cpu().to("cuda").',
)
