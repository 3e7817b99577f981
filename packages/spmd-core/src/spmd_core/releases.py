"""The releases of Python, torch and jax: those in use, those tested, and what one of them lacks.

torch and jax add, rename and remove names from release to release. What this package needs of
torch's overloads and of jax's experimental modules is found here, by name. A name that is gone is
listed by `versions`, with what stands in for it, and is no error at import: the other operations
work.
"""

import importlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import jaxlib
import torch

# (oldest, newest), both included. `benchmarks/results/releases.md` says what was run with each.
_TESTED = {
    "Python": ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "jax": ("0.10", "0.12"),
    "jaxlib": ("0.10", "0.12"),
}

# What some tested release lacks, and what stands in for it there.
_STANDS_IN = {
    "aten.cholesky.default": "torch.linalg.cholesky, as torch.cholesky's error says",
    "aten._upsample_lanczos2d_aa.default": "nothing: this torch has no mode 'lanczos' to call it",
    "aten._upsample_lanczos2d_aa_backward.default": "nothing, likewise",
    "c10/core/impl/DeviceGuardImplInterface.h": "nothing: Ctrl-C may end the process by an abort",
}
_STANDS_IN |= dict.fromkeys(
    ("jax._src.compilation_cache", "jax._src.compilation_cache.get_file_cache"),
    "jax's own cache on disk, which has no limit and keeps damaged programs",
)
_STANDS_IN |= dict.fromkeys(
    (
        "jax._src.interpreters.pxla",
        "jax._src.interpreters.pxla.ExecuteReplicated",
    ),
    "jax's own call of a program, which compares all arguments each time",
)
_STANDS_IN |= dict.fromkeys(
    (
        f"torch._higher_order_ops.{name}"
        for name in ("cond", "while_loop", "scan", "associative_scan")
    ),
    "spmd_core.control_flow",
)
_STANDS_IN["torch.distributed._composable.contract.STATE_KEY"] = (
    "nothing: torch's own fully_shard and replicate run, which do not know the device"
)
_DICT_VERSION = "torch._C._dynamo.guards.dict_version"
_STANDS_IN[_DICT_VERSION] = "captured steps compare all that dicts hold at each call"
_NO_STAND_IN = {
    "aten": "torch's decomposition of what replaced it, or the host, which is counted",
    "jax": "nothing: what needs it raises ImportError",
    "torch": "nothing: torch's own runs, which does not know the device",
}

# Names that this torch or jax lacks.
# Guarded by: imports. Cleared by: never.
_absent: dict[str, str] = {}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Versions:
    """The releases in use, and how they differ from those that this package was tested with.

    Attributes:
        python, torch, jax, jaxlib: the releases in use.
        tested: the oldest and the newest tested release of each, both included.
        untested: those in use that are outside of that range, such as `"torch 2.16.0"`.
        absent: for each overload or module that this torch or jax lacks, what stands in for it.
    """

    python: str
    torch: str
    jax: str
    jaxlib: str
    tested: dict[str, tuple[str, str]]
    untested: tuple[str, ...]
    absent: dict[str, str]

    def __str__(self) -> str:
        rows = [
            (name, release, f"tested from {oldest} to {newest}")
            for (name, (oldest, newest)), release in zip(
                self.tested.items(), (self.python, self.torch, self.jax, self.jaxlib)
            )
        ]
        rows += [(name, "absent", other) for name, other in self.absent.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def versions() -> Versions:
    """The releases of Python, torch and jax in use, those tested, and what is absent in them.

    Example:
        >>> print(versions())  # doctest: +ELLIPSIS
        Python  ...
    """
    used = _used()
    return Versions(
        used["Python"],
        used["torch"],
        used["jax"],
        used["jaxlib"],
        dict(_TESTED),
        tuple(f"{name} {release}" for name, release in used.items() if not _is_tested(name)),
        dict(sorted(_absent.items())),
    )


def warn_if_untested() -> None:
    """Warns if a release in use is outside of the tested range."""
    untested = versions().untested
    if untested:
        ranges = ", ".join(
            f"{name} {oldest} to {newest}" for name, (oldest, newest) in _TESTED.items()
        )
        warnings.warn(
            f"spmd_core is tested with {ranges}; got {', '.join(untested)}. Install a tested "
            "release, or look at spmd_core.debugging.versions() for what this one lacks.",
            stacklevel=3,
        )


def overload(name: str) -> torch._ops.OpOverload | None:
    """The overload that a name such as `"aten.add.Tensor"` stands for.

    None, and listed by `versions`, where this torch lacks it. Raises ValueError for a packet (a
    name without the overload part).
    """
    parts = name.split(".")
    if len(parts) != 3:
        raise ValueError(
            "an overload is named namespace.op.overload; "
            f"got {name!r}. Write for instance aten.add.Tensor."
        )
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    if found is None:
        _absent[name] = _STANDS_IN.get(name, _NO_STAND_IN["aten"])
    return found


def overloads(by_name: dict[str, _T]) -> dict[torch._ops.OpOverload, _T]:
    """A table whose keys are the overloads of these names, without those that this torch lacks."""
    found = {overload(name): value for name, value in by_name.items()}
    return {func: value for func, value in found.items() if func is not None}


def note_absent(name: str) -> None:
    """Has `versions` list something that this release lacks, with what stands in for it."""
    _absent[name] = _STANDS_IN[name]


def has_torch_module(name: str) -> bool:
    """Whether this torch has a module of this name, which is not imported for it.

    `versions` lists it where it has not.
    """
    path = Path(torch.__file__).parent.joinpath(*name.split(".")[1:])
    found = path.is_dir() or path.with_name(f"{path.name}.py").exists()
    if not found:
        _absent[name] = _STANDS_IN.get(name, _NO_STAND_IN["torch"])
    return found


def has_parts(module: ModuleType, *names: str) -> bool:
    """Whether a module of torch has these names, such as `"Class._method"`.

    `versions` lists those that it has not.
    """
    lacking = []
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            lacking.append(f"{module.__name__}.{name}")
    _absent.update({name: _STANDS_IN.get(name, _NO_STAND_IN["torch"]) for name in lacking})
    return not lacking


def jax_module(name: str, *used: str) -> Any:
    """A module of jax that may be missing or renamed in another release.

    Where this jax lacks it, or an attribute named in `used`, that is listed by `versions`, and
    raises ImportError when it is read.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another name is something that jax itself needs.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        _absent[name] = _STANDS_IN.get(name, _NO_STAND_IN["jax"])
        return _Lacking(name, None)
    lacking = [f"{name}.{attribute}" for attribute in used if not hasattr(module, attribute)]
    for attribute in lacking:
        _absent[attribute] = _STANDS_IN.get(attribute, _NO_STAND_IN["jax"])
    return _Lacking(name, module) if lacking else module


def dict_version() -> Callable[[dict[Any, Any]], int] | None:
    """torch's function that gives a dict a new number whenever it changes, as Dynamo needs it.

    None, and listed by `versions`, where this torch lacks it, or it does not tell.
    """
    found: Any = torch
    for part in _DICT_VERSION.split(".")[1:]:
        found = getattr(found, part, None)
    if found is not None and _tells(found):
        version: Callable[[dict[Any, Any]], int] = found
        return version
    _absent[_DICT_VERSION] = _STANDS_IN[_DICT_VERSION]
    return None


def _tells(version_of: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether a dict's number changes with the dict, and only then.

    CPython 3.13 keeps attributes in the object itself: to set one changes what `vars` returns, and
    not its number. More often than a few times, as frequent code is specialized.
    """

    class Object:
        a = 0

    one = Object()
    attributes, plain = vars(one), {"a": 0}
    for i in range(100):
        before = version_of(attributes), version_of(plain)
        if before != (version_of(attributes), version_of(plain)):
            return False
        one.a = i + 1
        plain["a"] = i + 1
        if before[0] == version_of(attributes) or before[1] == version_of(plain):
            return False
        between = version_of(attributes)
        object.__setattr__(one, "a", -i)
        if between == version_of(attributes):
            return False
    return True


class _Lacking:
    """Stands for a module that is absent, whole or in part: reading what is absent raises."""

    def __init__(self, name: str, module: ModuleType | None) -> None:
        self._name, self._module = name, module

    def __getattr__(self, attribute: str) -> Any:
        if self._module is not None and hasattr(self._module, attribute):
            return getattr(self._module, attribute)
        oldest, newest = _TESTED["jax"]
        raise ImportError(
            f"this needs {self._name}.{attribute}, which jax {jax.__version__} does not have. "
            f"Install jax {oldest} to {newest}."
        )


def _used() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def _is_tested(name: str) -> bool:
    oldest, newest = _TESTED[name]
    return _minor(oldest) <= _minor(_used()[name]) <= _minor(newest)


def _minor(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)
