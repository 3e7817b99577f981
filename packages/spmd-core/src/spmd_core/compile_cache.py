"""Compiled programs by key: a named list of ingredients, compared by value, so that a miss can say which ingredient changed."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from spmd_core import metrics
from spmd_core.config import config
from spmd_core.lowering import Program


class Key(NamedTuple):
    """What a program depends on. Entries are interned, so `structure` compares by identity."""

    structure: tuple[object, ...]  # each node's entry followed by the numbers of its inputs
    leaves: tuple[object, ...]  # spec and placement of each input
    outputs: tuple[object, ...]  # number and sharding of each result
    donated: tuple[int, ...]  # positions of the donated inputs
    device_ids: tuple[int, ...]


_programs: OrderedDict[Key, Program] = OrderedDict()


def get(key: Key, build: Callable[[], Program]) -> Program:
    """The key's program, compiled by `build` on a miss; the one used longest ago is dropped when there are too many."""
    program = _programs.get(key)
    if program is not None:
        _programs.move_to_end(key)
        metrics.count("cache_hits")
        return program
    program = _programs[key] = build()
    while len(_programs) > config.max_programs:
        _programs.popitem(last=False)
        metrics.count("programs_dropped")
    return program


def changed(new: Key, old: Key) -> tuple[str, ...]:
    """The names of the ingredients in which two keys differ."""
    return tuple(name for name in Key._fields if getattr(new, name) != getattr(old, name))


def keys() -> tuple[Key, ...]:
    """The keys in the cache, the most recently used last."""
    return tuple(_programs)


def newest() -> Program | None:
    """The most recently used program."""
    return next(reversed(_programs.values()), None)


def clear() -> None:
    """Drops every compiled program from memory."""
    _programs.clear()
