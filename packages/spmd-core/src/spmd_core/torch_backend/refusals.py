"""What torch does with tensors of the host on the way to the device, and the device refuses.

Operations with a tensor of the device arrive at the router, which refuses for itself
(`dispatch.layouts`). Here are nested tensors, which torch moves as a whole, and attention whose
kernel torch compiles.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention

from spmd_core.errors import UnsupportedOpError
from spmd_core.recording.layouts import Layout, refusal

_validate_device = flex_attention._validate_device
# torch's kernels that move nested tensors, or make them of others, by dispatch key.
_KERNELS = (
    ("_to_copy", "AutogradNestedTensor", Layout.NESTED),
    ("_nested_tensor_from_tensor_list", "CPU", Layout.NESTED),
)


def _unless_for_device(name: str, key: str, layout: Layout) -> Callable[..., torch.Tensor]:
    """torch's own kernel, except for results on the device."""
    own = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        for a in (*args, *kwargs.values()):
            if isinstance(a, torch.device) and a.type == "xla":
                raise refusal(layout, f"aten::{name}")
        made: torch.Tensor = own.call_boxed(keys, *args, **kwargs)
        return made

    return kernel


def _refuse_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """The check of `flex_attention`, with advice for tensors of the device."""
    if query.device.type == "xla":
        raise UnsupportedOpError(
            "flex_attention compiles a kernel by torch.compile, which has none for device 'xla'; "
            f"got a query of shape {tuple(query.shape)} on {query.device}. Call torch.nn."
            "functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), whose "
            "mask is a tensor of booleans or of scores to add, or spmd_core.call_jax."
        )
    _validate_device(query, key, value)


def install() -> torch.library.Library:
    """Registers the refusals, which live as long as the returned library."""
    flex_attention._validate_device = _refuse_attention
    library = torch.library.Library("aten", "IMPL")
    for name, key, layout in _KERNELS:
        kernel = _unless_for_device(name, key, layout)
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return library
