"""Starts compiled programs as jax's own dispatch does, without what that compares at each call.

jax compares shape, dtype, sharding and layout of each argument of each call, which is a quarter of
what a program with hundreds of arguments costs the host. A program here was compiled for the
placements of its arguments, so there is nothing to find.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd_core import releases

_pxla = releases.jax_module("jax._src.interpreters.pxla", "ExecuteReplicated")
# The arguments, on the devices, as one list -> the results, as one list.
Execute = Callable[[list[jax.Array]], list[jax.Array]]


def execute_of(compiled: jax.stages.Compiled) -> Execute | None:
    """Executes a program without comparing its arguments; does not wait.

    None where this jax, or this program, needs more than its executable: a program that calls the
    host, or has effects or constants apart.
    """
    try:
        execute = compiled._executable.unsafe_call  # type: ignore[attr-defined]
        is_plain = (
            type(execute) is _pxla.ExecuteReplicated
            and not (execute.has_unordered_effects or execute.has_host_callbacks)
            and not execute.ordered_effects
            and execute.mut is None
            and execute.pgle_profiler is None
            and len(execute.in_handler.in_shardings) == len(jax.tree.leaves(compiled.in_avals))
        )
        run, handlers = execute.xla_executable.execute_sharded, execute.out_handler.handlers
    except (AttributeError, ImportError):  # of a jax that has other names
        return None
    return (lambda arrays: run(arrays).consume_with_handlers(handlers)) if is_plain else None


def first_deleted(arrays: Sequence[jax.Array]) -> int | None:
    """Where the first array is that has no data; None if all have some.

    jaxlib 0.10 ends the process for such an argument of a program over several devices.

    Raises:
        TypeError: one is of another class than the first one.
    """
    if not arrays:
        return None
    is_deleted = type(arrays[0]).is_deleted  # in C, for thousands of arrays
    if not any(map(is_deleted, arrays)):
        return None
    return next(i for i, array in enumerate(arrays) if is_deleted(array))


class Replicated:
    """A small array on all devices of a program, which is uploaded when its elements are others.

    Args:
        dtype: numpy's.
        sharding: a replicated one.
    """

    def __init__(self, dtype: Any, sharding: jax.sharding.Sharding) -> None:
        self._dtype, self._sharding = dtype, sharding
        self._values: list[Any] | None = None
        self._bytes: bytes | None = None
        self._array: jax.Array

    def of(self, values: list[Any]) -> jax.Array:
        """The array with these elements. Does not wait; processes exchange nothing.

        Args:
            values: a list that nobody changes from here on.
        """
        if values is not self._values:
            elements = np.array(values, self._dtype)
            own = elements.tobytes()
            if own != self._bytes:
                with jax.enable_x64(True):
                    self._array = jax.make_array_from_callback(
                        elements.shape, self._sharding, lambda index: elements
                    )
                self._bytes = own
            self._values = values
        return self._array
