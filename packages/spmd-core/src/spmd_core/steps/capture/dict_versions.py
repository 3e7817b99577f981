"""The versions of many dicts, read at once: a dict has another one after each change.

CPython keeps a version beside the contents of a dict, up to 3.12, and torch has a function that
returns it. A captured step compares those of thousands of dicts at each call, so they are copied
out of the dicts in one call, which takes a sixth of the time of calling the function for each.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd_core import releases

_SIZE = 8  # of a version, in bytes
_version_of = releases.dict_version()


def are_told() -> bool:
    """Whether this Python has versions of dicts."""
    return _version_of is not None


class DictVersions:
    """The versions of some dicts.

    Args:
        dicts: plain ones, or of types that derive from dict. They are kept alive.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._places = (
            None if _PLACE is None else [memoryview(_at(id(one) + _PLACE)) for one in dicts]
        )

    def now(self) -> Sequence[Any]:
        """All versions, to be compared with earlier ones by `==`."""
        if self._places is not None:
            return b"".join(self._places)
        assert _version_of is not None
        return [*map(_version_of, self._dicts)]

    def changed(self, old: Sequence[Any], new: Sequence[Any]) -> Iterator[int]:
        """The positions of the dicts whose versions differ. An empty `old` differs in all."""
        size = len(new) // len(self._dicts) if self._dicts else 1
        for i in range(len(self._dicts)):
            if old[i * size : (i + 1) * size] != new[i * size : (i + 1) * size]:
                yield i


def _at(address: int) -> Any:
    return (ctypes.c_char * _SIZE).from_address(address)


def _place(version_of: Callable[[dict[Any, Any]], int] | None) -> int | None:
    """Where in a dict's object its version lies, in bytes; None if that is not found.

    Looked for among the words behind the reference count and the type, of which a dict has four.
    """
    if version_of is None or sys.implementation.name != "cpython":
        return None
    found = []
    first = 2 * ctypes.sizeof(ctypes.c_void_p)
    for place in range(first, first + 4 * _SIZE, _SIZE):
        dicts: list[dict[Any, Any]] = [{i: i for i in range(n)} for n in range(8)]
        is_there = True
        for i in range(32):
            for one in dicts:
                is_there &= int.from_bytes(_at(id(one) + place).raw, sys.byteorder) == version_of(
                    one
                )
                one[i % 3] = i
        if is_there:
            found.append(place)
    return found[0] if len(found) == 1 else None


_PLACE = _place(_version_of)
