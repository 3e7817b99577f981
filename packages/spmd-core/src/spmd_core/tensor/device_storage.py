"""The stand-in for torch's storage that a tensor on device `xla` has."""

from typing import Any

from spmd_core.graph.storage import Storage, address
from spmd_core.tensor.logical_device import XLA_DEVICE


class DeviceStorage:
    """Stands in for `torch.UntypedStorage`; equal for tensors that share one storage.

    Raises:
        AttributeError: for every attribute that would read, write or resize the bytes, which a
            device array does not expose.
    """

    device = XLA_DEVICE

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def data_ptr(self) -> int:
        """A number that identifies the storage."""
        return address(self._storage)

    def nbytes(self) -> int:
        """The number of bytes of all elements, over all shards."""
        return self._storage.spec.num_bytes

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceStorage) and other._storage is self._storage

    def __hash__(self) -> int:
        return hash(self._storage)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the storage of an xla tensor has no bytes that Python can reach; got .{name}. "
            "Use the tensor itself, or tensor.cpu().untyped_storage()."
        )
