"""What torch's schemas say of an overload: what it writes, what it aliases, which arguments are numbers, and its functional form."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Scalars that are nearly always the int 1 and then vanish from the program; as floats they are inputs like any other number.
_STATIC_WHEN_INT = ("alpha", "beta")
# In-place samplers whose functional form has a name of its own.
_FUNCTIONAL_NAME = {"normal_": "normal_functional"}


@dataclass(frozen=True)
class Schema:
    """The facts about one overload that the dispatcher needs."""

    names: tuple[str, ...]
    number_positions: tuple[
        int, ...
    ]  # arguments that may be Python numbers and are then inputs of the program
    number_names: frozenset[str]
    static_when_int: frozenset[str]
    written: tuple[str, ...]  # arguments that the operation writes
    out_names: tuple[str, ...]  # keyword-only written arguments: `out=`
    is_view: bool  # the result aliases an argument without writing it


@cache
def of(func: torch._ops.OpOverload, static: frozenset[str] = frozenset()) -> Schema:
    """The overload's schema, with the Scalars in `static` counted as static arguments."""
    arguments = func._schema.arguments
    numbers = [a.name for a in arguments if _may_be_number(a) and a.name not in static]
    written = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    aliasing = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return Schema(
        names=tuple(a.name for a in arguments),
        number_positions=tuple(i for i, a in enumerate(arguments) if a.name in numbers),
        number_names=frozenset(numbers),
        static_when_int=frozenset(n for n in numbers if n in _STATIC_WHEN_INT),
        written=written,
        out_names=tuple(a.name for a in arguments if a.kwarg_only and a.name in written),
        is_view=aliasing and not written,
    )


def _may_be_number(argument: Any) -> bool:
    kind = str(argument.type)
    return "Scalar" in kind or "number" in kind.lower() or kind in ("Tensor", "Optional[Tensor]")


@cache
def functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that computes what this in-place or `out=` overload writes; None where torch has none."""
    namespace, name = func._schema.name.split("::")
    facts = of(func)
    base = _FUNCTIONAL_NAME.get(name, name if facts.out_names else name.removesuffix("_"))
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return None
    wanted = [
        (a.name, str(a.type)) for a in func._schema.arguments if a.name not in facts.out_names
    ]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if of(candidate).written:
            continue
        given = [(a.name, str(a.type)) for a in candidate._schema.arguments]
        if given == wanted:
            return candidate
        # A factory's functional form has dtype and device besides; the `out` tensor supplies them.
        extra = [n for n, _ in given if n not in {m for m, _ in wanted}]
        if (
            given[: len(wanted)] == wanted
            and set(extra) <= {"dtype", "layout", "device", "pin_memory"}
            and extra
        ):
            return candidate
    return None


def has_kernel(func: torch._ops.OpOverload, key: str) -> bool:
    """Whether torch itself implements the overload at a dispatch key, such as CompositeExplicitAutograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
