"""What code names: the names and texts by which it can reach values, and whose code it is."""

import dis
import os
import sysconfig
import types
from collections.abc import Iterable, Iterator

from spmd_core import source_lines

_INSTALLED = tuple(
    path + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Code that names one of these may read any attribute of an object, by a name that it computes.
_ANY_NAME = "getattr of a computed name"
DYNAMIC = frozenset(
    {"vars", "__dict__", "asdict", "astuple", "fields", "attrgetter", "__getattribute__", _ANY_NAME}
)
_PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_ORDERING = frozenset({"min", "max", "round", "int", "bool", "clip", "clamp", "floor", "ceil"})
# By code: its names.
# Guarded by: the GIL. Cleared by: never; as many as there is code of steps.
_known: dict[types.CodeType, frozenset[str]] = {}


def names(code: types.CodeType) -> frozenset[str]:
    """The names of attributes and globals in code, and its texts, which may be such names."""
    found = _known.get(code)
    if found is None:
        found = _known[code] = frozenset(_names(code))
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from _texts(code.co_consts)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
    if "getattr" in code.co_names and _computes_a_name(code):
        yield _ANY_NAME


def _texts(constants: tuple[object, ...] | frozenset[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(tuple(constant))


def _computes_a_name(code: types.CodeType) -> bool:
    """Whether some `getattr` in code has another name than a text."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("PRECALL", "CACHE")]
    calls = sum(s.argval == "getattr" and s.opname.startswith("LOAD_") for s in steps)
    plain = 0
    for i, step in enumerate(steps):
        if step.opname.startswith("CALL") and step.arg in (2, 3) and i > step.arg:
            name = steps[i - step.arg + 1]  # the default is one instruction
            plain += name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    return plain < calls


def is_users(file: str) -> bool:
    """Whether the code of a file is the user's: no installed package's, and not Python's own."""
    return not source_lines.is_library(file) and not file.startswith(_INSTALLED)


def compares(code: types.CodeType) -> bool:
    """Whether code orders numbers: by `<` and the like, or by a function that does."""
    orders = any(step.opname == "COMPARE_OP" for step in dis.get_instructions(code))
    return orders or not _ORDERING.isdisjoint(code.co_names)


def of_libraries(codes: Iterable[types.CodeType]) -> set[str]:
    """The names in code of installed packages, which may read attributes of the user's objects."""
    found: set[str] = set()
    for code in codes:
        file = code.co_filename
        if file.startswith(_PACKAGES) and not source_lines.is_library(file):
            found |= names(code)
    return found
