"""Runs a function on a module when the program imports it, or at once if it is imported.

Parts of torch that only some programs use, such as `torch.distributed.fsdp`, take half a second to
import. This project changes them when they are imported.
"""

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from spmd_core import releases

Change = Callable[[ModuleType], None]

# The changes of modules that are not imported yet, by the module's name.
# Guarded by: the GIL, and Python's lock of the import. Cleared by: the import of the module.
_waiting: dict[str, list[Change]] = {}


def after_import(name: str, change: Change, *parts: str) -> None:
    """Calls `change(module)` once: now, or right after the import of the module of this name.

    Where this torch lacks the module, or a name of it in `parts` that the change needs, torch stays
    as it is, and `releases.versions` lists what is missing.
    """
    if name.startswith("torch.") and not releases.has_torch_module(name):
        return
    if parts:
        change = _if_it_has(parts, change)
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        change(module)
    else:
        _waiting.setdefault(name, []).append(change)


def _if_it_has(parts: Sequence[str], change: Change) -> Change:
    return lambda module: change(module) if releases.has_parts(module, *parts) else None


class _Finder:
    """Finds the awaited modules as Python does, and wraps their loaders."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Executes a module by its own loader, restores that, and then changes the module."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        for change in _waiting.pop(module.__name__, ()):
            change(module)


sys.meta_path.insert(0, _Finder)
