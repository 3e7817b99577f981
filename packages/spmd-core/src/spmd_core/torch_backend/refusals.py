"""Refuses what torch does with host tensors before an operation reaches the router.

Operations on a tensor of the device reach the router, which has refusals of its own
(`dispatch.layouts`). Refused here are nested tensors, which torch moves as a whole; quantized ones,
which it silently leaves on the host; and attention whose kernel torch compiles.
"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from spmd_core.errors import UnsupportedOpError
from spmd_core.recording.layouts import RefusedLayout, refusal, require_dense, require_strided
from spmd_core.torch_backend.after_import import after_import

# torch's kernels that move such tensors, or convert to them, by dispatch key.
_KERNELS = (
    ("_to_copy", "AutogradNestedTensor", RefusedLayout.NESTED),
    ("_nested_tensor_from_tensor_list", "CPU", RefusedLayout.NESTED),
)
# The dtypes of the tensors that torch makes of Python numbers, whatever the default dtype.
_DTYPES_OF_NUMBERS = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
# The operations that make the first quantized tensors; all others are computed from these.
_QUANTIZERS = (
    *("quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor.tensors"),
    *("quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized"),
    *("_make_per_tensor_quantized_tensor", "_make_per_channel_quantized_tensor"),
    "_empty_per_channel_affine_quantized",
)


def _unless_for_device(name: str, key: str, layout: RefusedLayout) -> Callable[..., torch.Tensor]:
    """torch's own kernel, except for results on the device."""
    own = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        for a in (*args, *kwargs.values()):
            if isinstance(a, torch.device) and a.type == "xla":
                raise refusal(layout, f"aten::{name}")
        made: torch.Tensor = own.call_boxed(keys, *args, **kwargs)
        return made

    return kernel


def _refuse_empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> NoReturn:
    """`aten::empty` where torch has no kernel for the device with this layout and dtype.

    torch cannot register a kernel for sparse or quantized tensors of this device alone.
    """
    if device is None or device.type != "xla":
        raise NotImplementedError(
            f"torch has no kernel of 'aten::empty.memory_format' for {dtype} and {layout} on "
            f"device {device}; got a call of it. Use another device, or install its backend."
        )
    require_strided(layout, "aten::empty", dtype)
    raise AssertionError(f"aten::empty of {dtype}, {layout} has a kernel for device 'xla'")


class _Quantized:
    """Refuses to move quantized tensors to the device, from the first one on.

    torch has no dispatch key for such a move alone, so the kernel intercepts each conversion of
    host tensors, which costs 2 microseconds. It is registered when the first quantized tensor is
    made: most programs make none.

    Attributes:
        library: the library of both registrations.
        watches: whether conversions are intercepted.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self.library, self.watches = library, False
        for name in _QUANTIZERS:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
                self._replace(name, "CPU", self._maker(name))

    def _maker(self, name: str) -> Callable[..., Any]:
        own = torch.library.get_kernel(f"aten::{name}", "CPU")

        def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not self.watches:
                self.watches = True
                self._watch()
            return own.call_boxed(keys, *args, **kwargs)

        return kernel

    def _watch(self) -> None:
        own = torch.library.get_kernel("aten::_to_copy", "BackendSelect")

        def kernel(keys: torch._C.DispatchKeySet, source: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if not isinstance(source, torch.Tensor):
                # torch passes a tensor that it has made of a Python number as a number.
                source = torch.tensor(source, dtype=_DTYPES_OF_NUMBERS[type(source)])
            elif device is not None and device.type == "xla":
                require_dense(source, "a tensor")
            return own.call_boxed(keys, source, **kwargs)

        self._replace("_to_copy", "BackendSelect", kernel)

    def _replace(self, name: str, key: str, kernel: Callable[..., Any]) -> None:
        with warnings.catch_warnings():
            # torch warns of a kernel that replaces one of its own, which is called in the end.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self.library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def _refuse_attention(module: ModuleType) -> None:
    """Makes the check of `flex_attention` give advice for tensors of the device."""
    theirs = module._validate_device

    @functools.wraps(theirs)
    def validate(query: torch.Tensor, *others: torch.Tensor) -> None:
        if query.device.type == "xla":
            raise UnsupportedOpError(
                "flex_attention is compiled to a kernel by inductor, which has none for device "
                f"'xla'; got a query of shape {tuple(query.shape)} on {query.device}. Call torch."
                "nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), "
                "whose mask is a tensor of booleans or of scores to add, or spmd_core.call_jax."
            )
        theirs(query, *others)

    module._validate_device = validate  # type: ignore[attr-defined]


def install() -> torch.library.Library:
    """Registers the refusals, which live as long as the returned library."""
    after_import("torch.nn.attention.flex_attention", _refuse_attention, "_validate_device")
    library = torch.library.Library("aten", "IMPL")
    for name, key, layout in _KERNELS:
        kernel = _unless_for_device(name, key, layout)
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    library.impl("empty.memory_format", _refuse_empty, "CompositeExplicitAutograd")
    _Quantized(library)
    return library
