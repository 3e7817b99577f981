"""Which sharding a tensor's gradients are constrained to."""

import weakref

from spmd_core.graph.storage import Handle
from spmd_core.sharding.sharding import Sharding


class GradientSharding:
    """The sharding that a tensor's gradients are constrained to: the one of the tensor's handle.

    The tensor and its gradient hook share this object. It holds the handle weakly: the hook lives
    as long as autograd's graph, and a value that is held at a cut becomes a result of the program,
    so a loss that lives through `sync()` would make all marked activations results. When the handle
    is gone, its last known sharding stays in effect.

    Attributes:
        shape: the shape of the handle's tensor.
    """

    def __init__(self, handle: Handle) -> None:
        self.follow(handle)

    def follow(self, handle: Handle) -> None:
        """From here on, gradients follow the sharding of this handle."""
        self._handle, self._sharding, self.shape = (
            weakref.ref(handle),
            handle.sharding,
            handle.spec.shape,
        )

    @property
    def sharding(self) -> Sharding | None:
        """The handle's sharding now, or, if the handle is gone, at the last call of `follow`."""
        handle = self._handle()
        return self._sharding if handle is None else handle.sharding
