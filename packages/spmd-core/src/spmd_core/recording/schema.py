"""Facts of a torch schema: what it writes and aliases, its scalars, its functional form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Scalars that are nearly always the int 1. As static arguments they vanish from the program; floats
# are inputs of the program like any other scalar.
_STATIC_WHEN_INT = ("alpha", "beta")
# Further ones by operation: whole numbers that say how something is counted. They hardly change
# from call to call, and passes reason with them (`program.sorted_rows`).
_STATIC_INTS = {"aten::floor_divide": ("other",), "aten::histc": ("min", "max")}
# In-place samplers whose functional form has a name of its own.
_FUNCTIONAL_NAME = {"normal_": "normal_functional"}


@dataclass(frozen=True)
class Schema:
    """The facts about one overload that the dispatcher needs.

    Attributes:
        names: of all arguments.
        number_positions: arguments that may be Python numbers: the scalar inputs of the program.
        number_names: the same arguments by name.
        static_when_int: those of them that are static arguments when the number is an int.
        written: arguments that the operation writes.
        out_names: keyword-only written arguments: `out=`.
        is_view: whether the result aliases an argument without writing it.
    """

    names: tuple[str, ...]
    number_positions: tuple[int, ...]
    number_names: frozenset[str]
    static_when_int: frozenset[str]
    written: tuple[str, ...]
    out_names: tuple[str, ...]
    is_view: bool

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call by name, without those that the caller left out."""
        return {**dict(zip(self.names, args)), **kwargs}


@cache
def of(func: torch._ops.OpOverload, static: frozenset[str] = frozenset()) -> Schema:
    """The facts about an overload; the Scalars named in `static` count as static arguments."""
    arguments = func._schema.arguments
    numbers = [a.name for a in arguments if _may_be_number(a) and a.name not in static]
    # An in-place form has those of the functional one, whose lowering is bound.
    of_operation = _STATIC_INTS.get(func._schema.name.removesuffix("_"), ())
    static_ints = (*_STATIC_WHEN_INT, *of_operation)
    written = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    aliasing = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return Schema(
        names=tuple(a.name for a in arguments),
        number_positions=tuple(i for i, a in enumerate(arguments) if a.name in numbers),
        number_names=frozenset(numbers),
        static_when_int=frozenset(n for n in numbers if n in static_ints),
        written=written,
        out_names=tuple(a.name for a in arguments if a.kwarg_only and a.name in written),
        is_view=aliasing and not written,
    )


def _may_be_number(argument: torch._C.Argument) -> bool:
    kind = str(argument.type)
    return "Scalar" in kind or "number" in kind.lower() or kind in ("Tensor", "Optional[Tensor]")


@cache
def functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that returns what this in-place or `out=` overload writes, or None."""
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
        # A factory's functional form also takes dtype and device; the `out` tensor supplies them.
        extra = [n for n, _ in given if n not in {m for m, _ in wanted}]
        if (
            given[: len(wanted)] == wanted
            and set(extra) <= {"dtype", "layout", "device", "pin_memory"}
            and extra
        ):
            return candidate
    return None


def generator_position(func: torch._ops.OpOverload) -> int | None:
    """The position of the generator among the arguments; None if there is none, or by name only."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "generator" and not argument.kwarg_only:
            return position
    return None


def has_kernel(func: torch._ops.OpOverload, key: str) -> bool:
    """Whether torch has a kernel at a dispatch key, such as CompositeExplicitAutograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
