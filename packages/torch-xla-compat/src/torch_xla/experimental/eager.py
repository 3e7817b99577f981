"""Eager mode: each operation runs as soon as it is called."""

from contextlib import AbstractContextManager

from spmd_core.dispatch import eager


def eager_mode(enable: bool) -> None:
    """Switches eager mode on or off."""
    eager.eager_mode(enable)


def is_eager_mode() -> bool:
    """Whether eager mode is on."""
    return eager.is_eager_mode()


def eager_mode_context(enable: bool) -> AbstractContextManager[None]:
    """Context in which eager mode is on or off."""
    return eager.eager_mode_context(enable)
