"""Compiled programs by key: a named list of ingredients, compared by value, so that a miss can say which ingredient changed."""

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from spmd_core import metrics
from spmd_core.config import CompilerOption, config
from spmd_core.graph.values import Entry, Spec
from spmd_core.metrics import ProgramRecord
from spmd_core.program.program import Program
from spmd_core.program.program_graph import Graph
from spmd_core.runtime import devices
from spmd_core.runtime.placement import Placement
from spmd_core.source_lines import Origin


class Key(NamedTuple):
    """What a program depends on. Entries are interned, so `structure` compares by identity."""

    structure: tuple[Entry | int, ...]  # each node's entry followed by the numbers of its inputs
    leaves: tuple[tuple[Spec, Placement], ...]  # spec and placement of each input
    outputs: tuple[
        tuple[int, Spec, Placement | None], ...
    ]  # number, spec and placement of each result
    donated: tuple[int, ...]  # positions of the donated inputs
    device_ids: tuple[int, ...]
    origins: tuple[
        Origin | None, ...
    ] = ()  # each node's, where `config.record_source_lines` was on: the program names them
    options: tuple[tuple[str, CompilerOption], ...] = ()  # `config.compiler_options`


@dataclass(frozen=True)
class Compiled:
    """What remains of a compilation also where its program was dropped since."""

    key: Key
    graph: Graph
    record: ProgramRecord


# The newest compilations, the newest last.
history: deque[Compiled] = deque(maxlen=64)
# Called after each compilation.
observers: list[Callable[[Compiled], None]] = []
_programs: OrderedDict[Key, Program] = OrderedDict()
# More than a program that we have seen needs, with room for all else that a process maps.
_MAPS_TO_SPARE = 20_000


def get(key: Key, build: Callable[[], Program]) -> Program:
    """The key's program, compiled by `build` on a miss; the one used longest ago is dropped when there are too many."""
    program = _programs.get(key)
    if program is not None:
        _programs.move_to_end(key)
        metrics.count("cache_hits")
        return program
    _make_room()
    program = _programs[key] = build()
    while len(_programs) > config.max_programs:
        _programs.popitem(last=False)
        metrics.count("programs_dropped")
    history.append(compiled := Compiled(key, program.graph, program.record))
    for observe in observers:
        observe(compiled)
    return program


def _make_room() -> None:
    """Drops the half of the programs that was used longest ago where few memory maps are left.

    XLA's CPU backend loads the code of a program into maps of its own, over a thousand for a large one, and crashes the process when Linux gives
    it no more (65,530 by default). This ends when XLA reports that as an error.
    """
    free = devices.free_memory_maps()
    if free is None or free >= _MAPS_TO_SPARE:
        return
    for _ in range(-(-len(_programs) // 2)):
        _programs.popitem(last=False)
        metrics.count("programs_dropped")
    gc.collect()  # a program and what it traced refer to each other


def changed(new: Key, old: Key) -> tuple[str, ...]:
    """The names of the ingredients in which two keys differ."""
    return tuple(name for name in Key._fields if getattr(new, name) != getattr(old, name))


def keys() -> tuple[Key, ...]:
    """The keys in the cache, the most recently used last."""
    return tuple(_programs)


def programs() -> tuple[Program, ...]:
    """The programs in the cache, the most recently used last."""
    return tuple(_programs.values())


def newest() -> Program | None:
    """The most recently used program."""
    return next(reversed(_programs.values()), None)


def clear() -> None:
    """Drops every compiled program from memory."""
    _programs.clear()
    history.clear()
