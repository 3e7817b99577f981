"""Changes of tensors on which captured steps depend, but for those of their values.

A step depends on the storage of thousands of tensors, on whether they require gradients and on
their hooks. It compares these anew only after one of them has changed, which is counted here.
"""

from typing import Any

import torch


class _Changes:
    """How many changes there were.

    Attributes:
        count: of watched tensors, in this process.
    """

    count = 0


# Guarded by: the GIL; a change that two threads count as one is still a change.
# Cleared by: never: only a difference counts.
changes = _Changes()


def watch(tensor: Any) -> None:
    """Has changes of a tensor on device `xla` counted from here on."""
    if not tensor._is_watched:
        tensor._is_watched = True


def note(tensor: Any) -> None:
    """Counts a change, if the tensor is watched."""
    if tensor._is_watched:
        changes.count += 1


def noting(name: str) -> Any:
    """A property that is an attribute of `torch.Tensor`, one in C, and notes when it is set."""
    attribute: Any = next(vars(kind)[name] for kind in torch.Tensor.__mro__ if name in vars(kind))

    def write(tensor: Any, value: Any) -> None:
        note(tensor)
        attribute.__set__(tensor, value)
        note(tensor)  # with the attributes of another tensor, it is watched as that one was

    return property(attribute.__get__, write)
