"""Eager mode: each operation runs when it is called."""

from contextlib import AbstractContextManager

from spmd_core import eager


def eager_mode(enable: bool) -> None:
    """Switches eager mode on or off."""
    eager.eager_mode(enable)


def is_eager_mode() -> bool:
    """Whether eager mode is on."""
    return eager.is_eager_mode()


def eager_mode_context(enable: bool) -> AbstractContextManager[None]:
    """Eager mode on or off inside."""
    return eager.eager_mode_context(enable)
