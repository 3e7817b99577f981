"""The arguments that an operation was recorded with, read back from the keys under which `recording` keeps its entries."""

from typing import Any

import torch

from spmd_core.graph.storage import Link
from spmd_core.graph.values import Entry, Spec
from spmd_core.recording import calls, schema

Named = dict[str, Any]


class Arguments:
    """Finds the static arguments of entries. Reads all of `recording.entries` once, when first asked."""

    def __init__(self) -> None:
        self._found: dict[int, Named] | None = None

    def of(self, entry: Entry) -> Named | None:
        """Each argument by name: a `Spec` for a tensor, a type for a number that is an input of the program, else the value itself.

        None where the entry is not kept any more, or was made by something else than a torch operation.
        """
        if self._found is None:
            self._found = {}
            for key, kept in list(calls.entries.items()):
                if isinstance(kept, Link):
                    self._found[id(kept.entry)] = _of_link(kept)
                elif isinstance(kept, Entry) and isinstance(key[0], calls.Call):
                    self._found[id(kept)] = _of_call(key)
        return self._found.get(id(entry))


def _of_link(link: Link) -> Named:
    func, args, kwargs = link.call
    names = schema.of(func).names[1:]
    return {name: _plain(a) for name, a in zip(names, args)} | {
        name: _plain(a) for name, a in kwargs.items()
    }


def _of_call(key: tuple[Any, ...]) -> Named:
    call, default_dtype, *parts = key
    names = schema.of(call.func).names
    named: Named = {"torch.get_default_dtype()": default_dtype}
    for position, part in enumerate(parts):
        is_keyword = (
            isinstance(part, tuple)
            and len(part) == 2
            and isinstance(part[0], str)
            and part[0] != "["
        )
        name, value = part if is_keyword else (names[position], part)
        named[name] = _plain(value)
    return named


def _plain(value: Any) -> Any:
    """A list of the key's as a tuple of its elements."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, tuple) and value and value[0] == "[":
        return tuple(part if isinstance(part, Spec) else part[1] for part in value[1:])
    return value


def text(value: Any) -> str:
    """An argument as a user would write it."""
    if isinstance(value, type):
        return f"a number of type {value.__name__}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, Spec):
        return f"a tensor {value!r} with strides {list(value.strides)}"
    return str(value) if isinstance(value, torch.dtype) else repr(value)
