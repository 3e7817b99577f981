"""The cache of compiled programs; its keys have named fields, to explain cache misses."""

import functools
import gc
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from spmd_core import counters, source_lines
from spmd_core.config import CompilerOption, config
from spmd_core.counters import ProgramRecord
from spmd_core.graph.placement import Placement
from spmd_core.graph.recorders import lock
from spmd_core.graph.values import Entry, Spec
from spmd_core.program import compile_progress
from spmd_core.program.compilation import build
from spmd_core.program.program import Program
from spmd_core.program.program_graph import RecordedGraph
from spmd_core.runtime import devices, interrupts
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
        bound: for a program for growing sizes, the greatest size; the other fields are then those
            of one size. None for any other program.
        slopes: for such a program, how the integers of the other fields depend on the size.
    """

    structure: tuple[Entry | int, ...]
    leaves: tuple[tuple[Spec, Placement], ...]
    outputs: tuple[tuple[int, Spec, Placement | None], ...]
    donated: tuple[int, ...]
    device_ids: tuple[int, ...]
    origins: tuple[Origin | None, ...] = ()
    options: tuple[tuple[str, CompilerOption], ...] = ()
    checks_indices: bool = False
    bound: int | None = None
    slopes: bytes = b""


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
# Those that run or were needed lately, by key: freed with whoever wants them.
# Guarded by: the graph lock. Cleared by: Python, as it is weak.
_compilations: "weakref.WeakValueDictionary[Key, Compilation]" = weakref.WeakValueDictionary()
# How often the cache was cleared. A program that is compiled meanwhile is of other devices.
# Guarded by: the graph lock. Cleared by: never: only differences count.
_num_cleared = 0
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
    """The key's program; on a miss it is built from the graph, under this name.

    Beyond `config.max_programs`, the least recently used program is dropped.
    """
    program = cached(key)
    if program is not None:
        return program
    _make_room()
    return _keep(key, _built(make_graph(), name))


def _built(graph: RecordedGraph, name: str) -> Program:
    with compile_progress.shown(name, len(graph.nodes), len(graph.device_ids)):
        return build(graph, name)


def _keep(key: Key, program: Program) -> Program:
    """Puts a new program into the cache."""
    _programs[key] = program
    _drop(len(_programs) - config.max_programs)
    history.append(compiled := Compiled(key, program.graph, program.record))
    for observe in observers:
        observe(compiled)
    return program


class Compilation:
    """The compilation of a program while other threads go on, without the graph lock.

    Threads that need the same program share it: one compiles, and the others wait.

    Args:
        key: the program's key.
        graph: the graph to lower.
        name: the program's name.
    """

    def __init__(self, key: Key, graph: RecordedGraph, name: str) -> None:
        self._key, self._graph, self._name = key, graph, name
        self._turn = threading.Lock()
        self._line = source_lines.user_line()
        self._num_cleared = _num_cleared
        self._program: Program | None = None
        self._error: Exception | None = None

    @staticmethod
    def of(key: Key, make_graph: Callable[[], RecordedGraph], name: str) -> "Compilation":
        """The compilation of a key, with the arguments of `get`; call it under the graph lock."""
        found = _compilations.get(key)
        if found is None or found._error is not None or found._num_cleared != _num_cleared:
            _make_room()
            found = _compilations[key] = Compilation(key, make_graph(), name)
        return found

    @interrupts.waits
    def run(self) -> None:
        """Compiles, or waits for the thread that does; call it without the graph lock.

        An error is kept for `result`, and an interruption is raised.
        """
        with self._turn:
            if self._program is None:
                self._make()

    def _make(self) -> None:
        try:
            with source_lines.on_behalf_of(self._line):
                program = _built(self._graph, self._name)
            with lock:
                if self._num_cleared == _num_cleared:
                    self._program, self._error = _keep(self._key, program), None
        except Exception as error:
            self._error = error

    def result(self) -> Program | None:
        """The program; None if it was not compiled, or for devices that are others by now.

        Raises:
            DeviceMemoryError, ProgramError: it could not be compiled.
        """
        if self._error is not None:
            raise self._error
        return self._program

    def forget_error(self) -> None:
        """Drops the error, whose traceback refers to this object."""
        self._error = None


def run(compilations: Sequence[Compilation]) -> None:
    """Runs compilations at the same time; call it without the graph lock."""
    if len(compilations) == 1:
        compilations[0].run()
        return
    threads = ThreadPoolExecutor(
        min(len(compilations), os.cpu_count() or 1), thread_name_prefix="spmd-compiling"
    )
    try:
        _wait([threads.submit(each.run) for each in compilations])
    finally:  # an interruption does not wait for those that run
        threads.shutdown(wait=False, cancel_futures=True)


@interrupts.waits
def _wait(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


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
    global _num_dropped, _num_cleared
    _num_cleared += 1
    _num_dropped += len(_programs)
    _programs.clear()
    history.clear()


devices.on_exchange.append(clear)
