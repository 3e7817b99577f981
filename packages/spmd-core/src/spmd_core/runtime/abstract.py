"""Arrays without data, for devices that are not there: what a plan's programs take and return."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from spmd_core import releases, source_lines
from spmd_core.errors import PlanReadError
from spmd_core.runtime import devices

_compilation_cache = releases.jax_module(
    "jax.experimental.compilation_cache.compilation_cache", "reset_cache"
)
_ENABLE_CACHE = "jax_enable_compilation_cache"


class AbstractArray:
    """An array on a device that is not there: a shape, a dtype and a sharding, and no elements.

    Attributes:
        shape: with the padding of uneven shards.
        dtype: numpy's.
        sharding: jax's.
    """

    __slots__ = ("__weakref__", "_is_deleted", "dtype", "shape", "sharding")

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> None:
        self.shape, self.dtype, self.sharding = shape, np.dtype(dtype), sharding
        self._is_deleted = False
        if _run is not None:
            _run.arrays[id(self)] = self

    def __repr__(self) -> str:
        return f"AbstractArray({self.dtype}{list(self.shape)}, {self.sharding})"

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """The size of one device's elements in bytes."""
        shape = self.sharding.shard_shape(self.shape)
        return int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize

    def delete(self) -> None:
        """Marks the array as taken over by a program."""
        self._is_deleted = True

    def is_deleted(self) -> bool:
        """Whether a program took the array over."""
        return self._is_deleted


def array(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    """An `AbstractArray`, typed as the `jax.Array` that it stands in for."""
    return AbstractArray(shape, dtype, sharding)


@dataclass
class Run:
    """A plan in progress.

    Attributes:
        dump_folder: where compilers write what lies in memory.
        on_program: called with a program and its arguments, instead of running it.
        before_read: called before a read is refused; it may raise to end the plan.
        arrays: all arrays that are alive, by their ids.
        programs: all programs, by their keys.
        texts: folders with the compiler's texts of programs, by what was compiled.
    """

    dump_folder: Path
    on_program: Callable[[Any, Sequence[AbstractArray]], None]
    before_read: Callable[[], None]
    arrays: "weakref.WeakValueDictionary[int, AbstractArray]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    programs: dict[Any, Any] = field(default_factory=dict)
    texts: dict[str, Path] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def live_bytes(self, *, besides: Iterable[AbstractArray]) -> int:
        """Bytes on one device of the arrays that are alive, without those in `besides`."""
        left_out = {id(x) for x in besides}
        # `valuerefs` copies at once: the threads of a loader make arrays meanwhile.
        alive = [x for ref in self.arrays.valuerefs() if (x := ref()) is not None]
        return sum(x.shard_bytes for x in alive if not x.is_deleted() and id(x) not in left_out)

    def compile_options(self) -> dict[str, str | bool]:
        """Options that make XLA write what lies in memory, each time into another folder."""
        folder = self.dump_folder / str(next(self._numbers))
        return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


# The plan that is being made.
# Guarded by: the GIL. Cleared by: the end of `planning`.
_run: Run | None = None


def run() -> Run | None:
    """The plan in progress; None where programs run."""
    return _run


def is_planning() -> bool:
    """Whether a plan is in progress: programs are not run, and tensors have no values."""
    return _run is not None


@contextmanager
def planning(on: tuple[jax.Device, ...], run: Run) -> Iterator[None]:
    """Inside, the devices are these, and nothing is computed on them or sent to them."""
    global _run
    with devices.exchanged(on), without_disk_cache():
        _run = run
        try:
            yield
        finally:
            _run = None


@contextmanager
def without_disk_cache() -> Iterator[None]:
    """Inside, jax compiles everything: a program from its cache would write no dump."""
    before = jax.config.values[_ENABLE_CACHE]
    jax.config.update(_ENABLE_CACHE, False)
    _compilation_cache.reset_cache()  # jax asks once whether there is a cache
    try:
        yield
    finally:
        jax.config.update(_ENABLE_CACHE, before)
        _compilation_cache.reset_cache()


def refuse(what: str) -> NoReturn:
    """Ends a plan that has reached its end, else raises PlanReadError.

    Args:
        what: what is read, for the message.
    """
    if _run is not None:
        _run.before_read()
    raise PlanReadError(
        f"a plan computes no values, so what is planned must not read {what}; "
        f"{source_lines.user_line()} does. Read after the steps, or in a function given to "
        "add_step_closure, which a plan does not call."
    )
