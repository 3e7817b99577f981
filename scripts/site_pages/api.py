"""The public names in the groups in which a user meets them, with signatures and docstrings.

The groups of `spmd_core` are the comments in its `__all__`; a module's names stand in its order.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import spmd_core as spmd
from scripts.site_pages.docstrings import markdown

_SOURCE = Path(spmd.__file__)
# Parts of a signature that say where a type is from.
_PREFIX = re.compile(
    r"\b(?:spmd_core|spmd_data|collections|typing|pathlib|contextlib|os|jax|numpy)(?:\.\w+)*\.(\w+)"
)


def core() -> str:
    """The groups of `spmd_core` itself."""
    parts, seen = [], {}
    for title, names in _groups():
        values = [(name, getattr(spmd, name)) for name in names]
        objects = [one for one in values if not isinstance(one[1], ModuleType)]
        if objects:
            parts.append(f"## {title}\n")
            parts += [_entry(f"spmd_core.{name}", value, seen) for name, value in objects]
    return "\n".join(parts)


def modules() -> str:
    """Modules that programs call: several processes, collectives, loops, DTensor's words."""
    return _of_modules("distributed", "manual", "control_flow", "dtensor", "checkpoint")


def debugging() -> str:
    """Modules for looking inside, and for figures of what ran."""
    return _of_modules("debugging", "debugging.profiler", "metrics")


def data() -> str:
    """The names of `spmd_data`."""
    module = importlib.import_module("spmd_data")
    seen: dict[int, str] = {}
    return "\n".join(_entry(f"spmd_data.{name}", value, seen) for name, value in _public(module))


def _of_modules(*names: str) -> str:
    seen = {id(getattr(spmd, name)): f"spmd_core.{name}" for name in spmd.__all__}
    parts = []
    for name in names:
        module = importlib.import_module(f"spmd_core.{name}")
        parts.append(f"## spmd_core.{name}\n\n{markdown(module.__doc__ or '')}\n")
        parts += [_entry(f"spmd_core.{name}.{one}", value, seen) for one, value in _public(module)]
    return "\n".join(parts)


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Title and names of each group of `__all__`, by the comments in its source."""
    source = _SOURCE.read_text()
    body = source[source.index("__all__ = [") : source.index("\n]", source.index("__all__ = ["))]
    title, names, in_title = "", [], False
    for line in body.splitlines()[1:]:
        text = line.strip()
        if text.startswith("#"):
            if not in_title:
                if names:
                    yield title, names
                title, names = "", []
            title, in_title = f"{title} {text.removeprefix('#').strip()}".strip(), True
        else:
            names.append(text.strip('",'))
            in_title = False
    yield title, names


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    """The names that users of the module see: of its `__all__`, or all that are not private."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "spmd")).startswith("spmd")
    ]
    return [(name, getattr(module, name)) for name in names]


def _entry(name: str, value: Any, seen: dict[int, str]) -> str:
    """One name, as a directive that search and links find."""
    first = seen.setdefault(id(value), name)
    if first != name:
        return f":::{{py:data}} {name}\nThe same as {{py:obj}}`{first}`.\n:::\n"
    if isinstance(value, type):
        return _class(name, value)
    if callable(value):
        return f"::::{{py:function}} {name}{_signature(value)}\n{_documented(value)}\n::::\n"
    kind = type(value)
    text = _documented(kind) if kind.__module__.startswith("spmd") else f"`{value!r}`"
    return f"::::{{py:data}} {name}\n{text}\n::::\n"


def _class(name: str, kind: type) -> str:
    shown = [f":::::{{py:class}} {name}{_signature(kind)}", _documented(kind)]
    if not kind.__module__.startswith("torch."):
        for attribute, value in vars(kind).items():
            is_hidden = attribute.startswith("_") or not inspect.getdoc(value)
            if is_hidden or isinstance(value, type):
                continue
            if isinstance(value, property):
                shown.append(f"::::{{py:property}} {attribute}\n{_documented(value)}\n::::")
            elif callable(value) or isinstance(value, (classmethod, staticmethod)):
                function = getattr(value, "__func__", value)
                text = _documented(function)
                shown.append(f"::::{{py:method}} {attribute}{_signature(function)}\n{text}\n::::")
    return "\n".join([*shown, ":::::\n"])


def _documented(value: Any) -> str:
    if getattr(value, "__module__", None) and str(value.__module__).startswith("torch."):
        return "torch's own; see torch's documentation."
    return markdown(inspect.getdoc(value) or "")


def _signature(value: Any) -> str:
    """`(t, mesh, ...)` in one line, without the modules of types and without unprintable values."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "()"
    text = _PREFIX.sub(r"\1", re.sub(r"<[^<>]*>", "...", text))
    text = re.sub(r"^\((self|cls)(, )?", "(", text)
    return re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)  # annotations that are texts
