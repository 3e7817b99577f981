"""Whether all that a captured step reaches is as it was: compared before each captured call.

Identities are compared, in C where there are many: a step may reach tens of thousands of values.
"""

import itertools
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from spmd_core.steps.capture import contents
from spmd_core.steps.capture.reachable import MISSING, Reached, held

_handle_of = operator.attrgetter("_handle")
_sharding_of = operator.attrgetter("sharding")
_code_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_values = operator.methodcaller("values")
_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Guards:
    """Whether what a walk found is still the same.

    Args:
        reached: what a walk found.
        live: paths of numbers of param_groups that may vary.
    """

    def __init__(self, reached: Reached, live: Collection[str] = ()) -> None:
        free = {(id(mapping), key) for path in live for mapping, key in [reached.numbers[path]]}
        self._empty = [x for x in (*reached.mappings, *reached.sequences) if not x]
        self._mappings = [x for x in reached.mappings if x]
        self._mapping_sizes = [len(m) for m in self._mappings]
        self._mapping_keys = [k for m in self._mappings for k in m]
        self._mapping_values = [v for m in self._mappings for v in m.values()]
        self._sequences = [x for x in reached.sequences if x]
        self._sequence_sizes = [len(s) for s in self._sequences]
        self._sequence_values = [v for s in self._sequences for v in s]
        self._named: list[tuple[Any, list[Any], list[Any]]] = []
        by_names: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        for one in reached.named:
            kept = [
                (n, v) for n, v in zip(one.names, one.values) if (id(one.mapping), n) not in free
            ]
            names = tuple(n for n, _ in kept)
            if type(one.mapping) is dict and len(names) > 1:
                mappings, values = by_names.setdefault(names, ([], []))
                mappings.append(one.mapping)
                values += [v for _, v in kept]
            elif names:
                self._named.append((one.mapping, [*names], [v for _, v in kept]))
        self._by_names = [(operator.itemgetter(*names), *of) for names, of in by_names.items()]
        self._cells = [(cell, held(cell)) for cell in reached.cells]
        self._sized = reached.sized
        self._sizes = [len(x) for x in self._sized]
        absent = [(mapping.keys(), frozenset(names)) for mapping, names in reached.absent.values()]
        self._keys = [keys for keys, names in absent if names]
        self._absent = [names for _, names in absent if names]
        self._functions = reached.functions
        self._codes = [x for function in self._functions for x in _code_of(function)]
        self._contents = reached.contents
        self._tensors = list(reached.tensors.values())
        self._handles = [t._handle for t in self._tensors]
        self._storages = [h.storage for h in self._handles]
        self._shardings = [s.sharding for s in self._storages]
        self._requires_grad = [t.requires_grad for t in self._tensors]
        self._hooked = [t for t in self._tensors if t.requires_grad and t.is_leaf]
        self._hooks = [x for t in self._hooked for x in _hooks_of(t)]

    def hold(self) -> bool:
        """Whether all values are where they were. Does not wait."""
        same, chain = operator.is_, itertools.chain.from_iterable
        try:
            return (
                not any(self._empty)
                and [*map(len, self._mappings)] == self._mapping_sizes
                and all(map(same, chain(self._mappings), self._mapping_keys))
                and all(map(same, chain(map(_values, self._mappings)), self._mapping_values))
                and [*map(len, self._sequences)] == self._sequence_sizes
                and all(map(same, chain(self._sequences), self._sequence_values))
                and all(
                    all(map(same, chain(map(get, mappings)), values))
                    for get, mappings, values in self._by_names
                )
                and all(
                    mapping.get(name, MISSING) is value
                    for mapping, names, values in self._named
                    for name, value in zip(names, values)
                )
                and all(held(cell) is value for cell, value in self._cells)
                and all(map(same, map(_handle_of, self._tensors), self._handles))
                and all(map(same, map(_sharding_of, self._storages), self._shardings))
                and [*map(_requires_grad, self._tensors)] == self._requires_grad
                and [*map(len, self._sized)] == self._sizes
                and all(map(_are_disjoint, self._keys, self._absent))
                and all(map(same, chain(map(_code_of, self._functions)), self._codes))
                and all(map(same, chain(map(_hooks_of, self._hooked)), self._hooks))
                and all(contents.of("", x) == found for x, found in self._contents)
            )
        except KeyError:  # a name is gone
            return False


def _are_disjoint(keys: Any, names: frozenset[Any]) -> bool:
    found: bool = keys.isdisjoint(names)
    return found
