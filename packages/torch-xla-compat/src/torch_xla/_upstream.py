"""Upstream's exception types, and refusal of names that have no meaning here."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


@contextmanager
def raising(kind: type[Exception], *ours: type[Exception]) -> Iterator[None]:
    """Context in which an exception of a type in `ours` becomes one of `kind`, same message."""
    try:
        yield
    except ours as error:
        if isinstance(error, kind):
            raise
        raise kind(str(error)) from error


def warn_of_one_replica(name: str) -> None:
    """Warns that a function which starts a process for each device upstream runs one replica."""
    warnings.warn(
        f"{name} starts a process for each device in PyTorch/XLA; here it runs one replica, in "
        "this process. To use several devices, call torch_xla.runtime.use_spmd(), build a Mesh and "
        "mark tensors with mark_sharding; for several hosts, start a process on each and call "
        "spmd_core.distributed.initialize() first.",
        stacklevel=4,  # the caller of a function that arguments.checked wraps
    )


def refuse(name: str, reason: str, instead: str) -> NoReturn:
    """Raises NotImplementedError for a torch_xla name that has no meaning here."""
    raise NotImplementedError(
        f"{name} {reason}; it is not available in this torch_xla, which runs on spmd_core. "
        f"{instead}"
    )


def refused(name: str, reason: str, instead: str) -> Callable[..., Any]:
    """Returns a function that can be imported and raises NotImplementedError when called."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, reason, instead)

    function.__name__ = function.__qualname__ = name.rsplit(".", 1)[-1]
    function.__doc__ = f"Not available: {reason}. {instead}"
    return function
