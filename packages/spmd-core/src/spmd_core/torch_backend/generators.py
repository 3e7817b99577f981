"""`torch.Generator(device="xla")`: a CPU generator of torch that reports device `xla`.

The device draws its seeds from CPU generators (`recording.random_stream`), so the numbers are those
that `torch.Generator()` with the same seed gives on the device. torch creates a generator in C++ by
hooks of the device type. Only a C++ library can register these for XLA, and the class itself is
immutable, so `install` binds the name `torch.Generator` to a class that chooses. No longer needed
once torch can make generators of a device by a Python function.
"""

from typing import Any

import torch

from spmd_core.tensor.logical_device import XLA_DEVICE, require_logical

_TorchGenerator: Any = torch._C.Generator


class XlaGenerator(_TorchGenerator):
    """What `torch.Generator(device="xla")` returns."""

    def __new__(cls) -> "XlaGenerator":
        return super().__new__(cls, "cpu")

    @property
    def device(self) -> torch.device:
        """Device `xla:0`."""
        return XLA_DEVICE

    def set_state(self, new_state: torch.Tensor) -> "XlaGenerator":
        """Sets the state to a result of `get_state`, which may meanwhile be on any device."""
        super().set_state(new_state.cpu())
        return self

    def clone_state(self) -> "XlaGenerator":
        """Another generator with the same state."""
        return XlaGenerator().set_state(self.get_state())

    def __reduce__(self) -> Any:
        return Generator, ("xla",), self.get_state()

    __setstate__ = set_state


class _ChoosesByDevice(type(_TorchGenerator)):  # type: ignore[misc]
    """The type of `Generator`: a call chooses the class, and all torch generators are instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = args[0] if args else kwargs.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "xla":
            require_logical(torch.device(device))
            return XlaGenerator()
        return _TorchGenerator(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is Generator:
            return isinstance(instance, _TorchGenerator)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is Generator:
            return issubclass(subclass, _TorchGenerator)
        return super().__subclasscheck__(subclass)


class Generator(_TorchGenerator, metaclass=_ChoosesByDevice):  # noqa: D101 - torch's, below
    __doc__ = _TorchGenerator.__doc__


# A pickle names torch's class, so that it can be read without this project.
Generator.__module__ = "torch"


def install() -> None:
    """Makes `torch.Generator` accept device `xla`; generators of other devices are torch's."""
    torch.Generator = Generator  # type: ignore[misc]
