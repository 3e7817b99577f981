"""Which indices eager torch accepts in an operation's arguments: rules for `lowering(indices=...)`.

Masks are not indices, and an argument without elements has none. Also `Bounds` for traits: which
integers an operation's results can have, for positions and for integers between two numbers.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmd_core.ops.kernels.traits import Bounds
from spmd_core.ops.registry import IndexRule, IndexRules

_MASKS = (torch.bool, torch.uint8)


def _within(
    arguments: Mapping[str, Any], name: str, size: int, *, wraps: bool = False
) -> Iterator[IndexRule]:
    """Indices from 0 to below the size; with `wraps`, negative indices count from the end."""
    if 0 not in arguments[name].shape:
        yield IndexRule(name, -size if wraps else 0, size - 1)


def along_dim(*, wraps: bool = False) -> IndexRules:
    """`index` lies in the dim `dim` of `self`."""

    def rules(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
        shape = arguments["self"].shape or (1,)
        yield from _within(arguments, "index", shape[arguments["dim"]], wraps=wraps)

    return rules


def of_rows(index: str, table: str) -> IndexRules:
    """The argument `index` has numbers of rows of the argument `table`."""
    return lambda arguments: _within(arguments, index, arguments[table].shape[0])


def of_elements(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
    """`index` has positions in the flattened `self`."""
    yield from _within(arguments, "index", arguments["self"].num_elements, wraps=True)


def of_each_dim(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
    """`indices` has a tensor of indices or None for each of the first dims of `self`."""
    for item, index in enumerate(arguments["indices"]):
        if index is not None and index.dtype not in _MASKS and 0 not in index.shape:
            size = arguments["self"].shape[item]
            yield IndexRule("indices", -size, size - 1, item)


def of_classes(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
    """`target` has classes, which are the second dim of `self`, or its only one."""
    shape = arguments["self"].shape
    if 0 not in arguments["target"].shape:
        num_classes = shape[1 if len(shape) > 1 else 0]
        yield IndexRule("target", 0, num_classes - 1, skip=arguments["ignore_index"])


def of_last_dim(*, least: int = 0) -> IndexRules:
    """`target` has classes, which are the last dim of `self`, or numbers from `least` on."""

    def rules(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
        if 0 not in arguments["target"].shape:
            shape = arguments["self"].shape or (1,)
            yield IndexRule("target", least, shape[-1] - 1)

    return rules


def of_bags(arguments: Mapping[str, Any]) -> Iterator[IndexRule]:
    """`indices` has numbers of rows of `weight`, and `offsets` positions where bags begin."""
    yield from _within(arguments, "indices", arguments["weight"].shape[0])
    yield from _within(arguments, "offsets", arguments["indices"].shape[0] + 1)


def positions(result: int, default: int | None = None) -> Bounds:
    """A result has positions in the dim `dim` of `self`; for None, in the flattened one.

    Args:
        result: the position of the result.
        default: the dim if the call does not give it.
    """

    def bounds(arguments: Mapping[str, Any], index: int, num: int) -> tuple[int, int] | None:
        shape, dim = arguments["self"].shape or (1,), arguments.get("dim", default)
        size = math.prod(shape) if dim is None else shape[dim]
        return (0, size - 1) if index == result else None

    return bounds


def between(low: str | None, end: str) -> Bounds:
    """Integers from the argument `low`, or 0 without it, to below the argument `end`."""

    def bounds(arguments: Mapping[str, Any], index: int, num: int) -> tuple[int, int] | None:
        first = 0 if low is None else arguments.get(low, 0)
        last = arguments.get(end)
        return (first, last - 1) if type(first) is type(last) is int else None

    return bounds


def steps(arguments: Mapping[str, Any], index: int, num: int) -> tuple[int, int] | None:
    """Integers from `start` on, by `step`."""
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if not (type(start) is type(step) is int):
        return None
    last = start + step * max(num - 1, 0)
    return min(start, last), max(start, last)
