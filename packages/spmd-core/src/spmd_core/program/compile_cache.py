"""The cache of compiled programs; its keys have named fields, to explain cache misses."""

import functools
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from spmd_core import counters
from spmd_core.config import CompilerOption, config
from spmd_core.counters import ProgramRecord
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry, Spec
from spmd_core.program import compile_progress, tensor_names
from spmd_core.program.compilation import Making, building, compile_lowered, completed
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime import devices
from spmd_core.source_lines import Origin


class Key(NamedTuple):
    """Everything that a program depends on. Entries are interned, so they compare by identity.

    Attributes:
        structure: each node's entry, followed by the value numbers of its inputs.
        leaves: the spec and placement of each input.
        outputs: the value number, spec and placement of each result.
        donated: positions of the donated inputs.
        device_ids: the program's devices.
        origins: each node's origin, after which the program's operations are named; `()` if
            `config.record_source_lines` was off.
        options: `config.compiler_options`, sorted by name.
        checks_indices: `config.check_indices`.
        fold_layers: `config.fold_layers`.
        bound: for a program for growing sizes, the greatest size; the other fields are then those
            of one size. None for any other program.
        slopes: for such a program, how the integers of the other fields depend on the size.
        found: the shardings that automatic sharding has found (`automatic.search`); None without.
    """

    structure: tuple[Entry | int, ...]
    leaves: tuple[tuple[Spec, Placement], ...]
    outputs: tuple[tuple[int, Spec, Placement | None], ...]
    donated: tuple[int, ...]
    device_ids: tuple[int, ...]
    origins: tuple[Origin | None, ...] = ()
    options: tuple[tuple[str, CompilerOption], ...] = ()
    checks_indices: bool = False
    fold_layers: bool = False
    bound: int | None = None
    slopes: bytes = b""
    found: Hashable = None


@dataclass(frozen=True)
class Compiled:
    """The record of a compilation; it is kept even if the program is dropped from the cache."""

    key: Key
    graph: RecordedGraph
    record: ProgramRecord


# The most recent compilations, newest last.
# Guarded by: the graph lock. Cleared by: compile_cache.clear().
history: deque[Compiled] = deque(maxlen=64)
# Called after each compilation.
# Guarded by: imports. Cleared by: never.
observers: list[Callable[[Compiled], None]] = []
# At most `config.max_programs`.
# Guarded by: the graph lock. Cleared by: compile_cache.clear().
_programs: OrderedDict[Key, Program] = OrderedDict()
# With fewer free memory maps than this, programs are dropped before the next one is compiled. The
# number is more than any program seen so far needs, and leaves some for the rest of the process.
_MIN_FREE_MAPS = 20_000
# The number of programs dropped since jax's caches were last cleared, and the number at which they
# are cleared, for releases of jax that keep programs alive.
# Guarded by: the graph lock.
# Cleared by: never: only the next clearing of jax's caches depends on it.
_num_dropped = 0
_MAX_DROPPED = 64


def cached(key: Key) -> Program | None:
    """The key's program; None if it is not in the cache."""
    program = _programs.get(key)
    if program is not None:
        _programs.move_to_end(key)
        counters.count("cache_hits")
    return program


def has(key: Key) -> bool:
    """Whether the key's program is in the cache. Counts as no use of it."""
    return key in _programs


def get(key: Key, make_graph: Callable[[], RecordedGraph], name: str) -> Program:
    """The key's program; on a miss it is built from the graph, under this name."""
    program = cached(key)
    if program is not None:
        return program
    return completed(making(key, make_graph, name), compile_lowered)


def making(key: Key, make_graph: Callable[[], RecordedGraph], name: str) -> Making:
    """Makes a program that is not in the cache, as `compilation.building` does, and puts it there.

    Beyond `config.max_programs`, the least recently used program is dropped.
    """
    _make_room()
    graph = make_graph()
    with compile_progress.shown(name, len(graph.nodes), len(graph.device_ids)):
        program = yield from building(graph, name, names=tensor_names.names)
    _programs[key] = program
    _drop(len(_programs) - config.max_programs)
    history.append(compiled := Compiled(key, program.graph, program.record))
    for observe in observers:
        observe(compiled)
    return program


def _make_room() -> None:
    """Drops the less recently used half of the programs if few memory maps are left.

    XLA's CPU backend loads a program's code into memory maps of its own, over a thousand for a
    large program, and crashes the process when Linux grants no more (65,530 by default). This can
    go once XLA reports that as an error.
    """
    free = devices.free_memory_maps()
    if free is None or free >= _MIN_FREE_MAPS:
        return
    _drop(-(-len(_programs) // 2), now=True)
    gc.collect()  # a program and its traced function refer to each other


def _drop(number: int, *, now: bool = False) -> None:
    """Drops the least recently used programs; with `now`, frees their memory at once."""
    global _num_dropped
    for _ in range(number):
        _programs.popitem(last=False)
        counters.count("programs_dropped")
        _num_dropped += 1
    if (now or _num_dropped >= _MAX_DROPPED) and _jax_keeps_programs():
        # This clears all of jax's caches, as there is no public way to clear a single one.
        # Functions that the user compiled with jax.jit compile again, so it is done for several
        # programs at once.
        jax.clear_caches()
        _num_dropped = 0


@functools.cache
def _jax_keeps_programs() -> bool:
    """Whether jax keeps a program that nothing else refers to.

    With `keep_unused=True`, a weak cache of jax 0.12 maps the traced function to itself, so that
    neither it nor its program is ever freed (`_dce_jaxpr`; jax 0.10 made a new object). This can go
    once no tested release of jax does this.
    """
    traced = jax.jit(lambda x: x, keep_unused=True).trace(jax.ShapeDtypeStruct((), np.float32))
    traced.lower()
    function = weakref.ref(traced.jaxpr)
    del traced
    gc.collect()
    return function() is not None


def changed(new: Key, old: Key) -> tuple[str, ...]:
    """The names of the fields in which two keys differ."""
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
    global _num_dropped
    _num_dropped += len(_programs)
    _programs.clear()
    history.clear()


devices.on_exchange.append(clear)
