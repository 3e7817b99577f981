"""What every module here shares: upstream's exception types in place of ours, and names that mean nothing in this system."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


@contextmanager
def raising(kind: type[Exception], *ours: type[Exception]) -> Iterator[None]:
    """Inside, an exception of ours becomes one of `kind`, with the same words."""
    try:
        yield
    except ours as error:
        if isinstance(error, kind):
            raise
        raise kind(str(error)) from error


def refuse(name: str, reason: str, instead: str) -> NoReturn:
    """Raises NotImplementedError for a name of torch_xla's that means nothing here."""
    raise NotImplementedError(
        f"{name} {reason}; it is not available in this torch_xla, which runs on spmd_core. {instead}"
    )


def refused(name: str, reason: str, instead: str) -> Callable[..., Any]:
    """A function that refuses, and can be imported."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, reason, instead)

    function.__name__ = function.__qualname__ = name.rsplit(".", 1)[-1]
    function.__doc__ = f"Not available: {reason}. {instead}"
    return function
