"""A context in which PyTorch/XLA donates only the buffers that the program names."""

from collections.abc import Iterator
from contextlib import contextmanager

from spmd_core.arguments import checked
from torch_xla import _XLAC


@checked()
@contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[None]:
    """Sets `_XLAC`'s switch inside; see `_XLAC._set_buffer_donation` for what it means here."""
    before = _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(should_alias)
    try:
        yield
    finally:
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(before)
