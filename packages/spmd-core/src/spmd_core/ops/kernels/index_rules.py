"""Which indices eager torch accepts in an operation's arguments: rules for `lowering(indices=...)`.

Masks are no indices, and an argument without elements has none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmd_core.ops.registry import IndexRule, IndexRules

_MASKS = (torch.bool, torch.uint8)


def _within(
    arguments: Mapping[str, Any], name: str, size: int, *, wraps: bool = False
) -> Iterator[IndexRule]:
    """Indices from 0 to the size; if it wraps, negative ones count from the end."""
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
