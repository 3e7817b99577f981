"""The fingerprint of a program, by which processes check that they start the same programs.

`runtime.watch` compares the fingerprints. The text behind a fingerprint is equal in all processes
that record the same program: operations with their static arguments, and the placements of inputs
and results. Facts that may differ are left out: addresses, the user's folders, and which buffers
are donated.
"""

import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spmd_core import source_lines
from spmd_core.graph.placement import Placement
from spmd_core.graph.values import Entry, Spec
from spmd_core.program.compile_cache import Key
from spmd_core.runtime import devices
from spmd_core.runtime import watch as watching
from spmd_core.runtime.jax_sharding import sharding_text
from spmd_core.sharding.sharding import Sharding

_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, Spec)
# For each program, the hash of its key and the processes that run it.
# Guarded by: the graph lock. Cleared by: never, a cache.
_known: "weakref.WeakKeyDictionary[Any, tuple[bytes, tuple[int, ...]]]" = (
    weakref.WeakKeyDictionary()
)


def note(key: Key, program: Any, numbers: Sequence[Sequence[Any]]) -> None:
    """Announces a program that is about to start to the other processes, if there are any.

    A new program is compared before it is compiled, which waits for a neighbour to reach it. Other
    programs are compared by a thread, within about a second.

    Args:
        key: the program's key.
        program: the program; None if it is not compiled yet.
        numbers: its floats, ints and complex numbers.

    Raises:
        ProcessError: see `Watch.note`.
    """
    watch = watching.watch
    if watch is None:
        return
    found = None if program is None else _known.get(program)
    if found is None:
        found = (digest(key), processes_of(key.device_ids))
        if program is not None:
            _known[program] = found
    what, group = found
    if len(group) < 2:
        return
    floats, ints, complexes = numbers
    what += np.array(floats, np.float64).tobytes() + repr([*map(int, ints)]).encode()
    what += np.array(complexes, np.complex128).tobytes()
    watch.note(
        group,
        what,
        source_lines.user_line(),
        functools.partial(_described, key, floats, ints, complexes),
        compares=program is None,
    )


@functools.lru_cache(maxsize=1024)
def processes_of(device_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The processes that these devices belong to, ascending."""
    return tuple(sorted({devices.process_of(i) for i in device_ids}))


devices.on_exchange.append(processes_of.cache_clear)


def digest(key: Key) -> bytes:
    """A hash of a program's key, equal in all processes that record the same program."""
    return hashlib.blake2b("\n".join(lines(key)).encode(), digest_size=16).digest()


def lines(key: Key) -> list[str]:
    """A program's key as text: one line for each operation, input and result."""
    found: list[str] = []
    inputs: list[int] = []
    entry: Entry | None = None
    for part in (*key.structure, None):
        if isinstance(part, int):
            inputs.append(part)
            continue
        if entry is not None:
            found.append(f"{entry_text(entry)} of {inputs}")
        entry, inputs = part, []
    found += [f"input {spec!r} {_placement(place, spec)}" for spec, place in key.leaves]
    found += [
        f"result {number} {spec!r} {'' if place is None else _placement(place, spec)}"
        for number, spec, place in key.outputs
    ]
    found.append(f"devices {key.device_ids} {key.options} {key.checks_indices}")
    if key.fold_layers:
        found.append("with repeated layers as loops")
    found.append(f"growing size {key.bound} {key.slopes.hex()}")
    return found


def _described(
    key: Key, floats: Sequence[Any], ints: Sequence[Any], other: Sequence[Any]
) -> list[str]:
    """As `lines`, with the numbers of each operation, and its source line if that was recorded."""
    found = lines(key)
    numbers = {float: iter(floats), complex: iter(other)}
    rest = iter(ints)
    entries = [part for part in key.structure if not isinstance(part, int)]
    for i, entry in enumerate(entries):
        taken = [next(numbers.get(kind, rest), None) for kind in entry.number_kinds]
        if taken:
            found[i] += f" with numbers {taken}"
        if key.origins and key.origins[i] is not None:
            found[i] += f", recorded at {key.origins[i]}"
    return [*found, *(f"number {number!r}" for number in rest)]


def entry_text(entry: Entry) -> str:
    """An operation with its results and static arguments; equal in all processes."""
    text = f"{entry.name} -> {', '.join(map(repr, entry.outs))}"
    arguments = {
        name: _argument(value)
        for name, value in (entry.arguments or {}).items()
        if not isinstance(value, Spec)
    }
    if arguments:
        text += f" with {arguments}"
    if entry.sharding is not None:
        text += f" marked {mark_text(entry.sharding)} {entry.along} {entry.summed_over}"
    if entry.border is not None:
        text += f" {mark_text(entry.border.sharding)} {entry.border.is_exit}"
    for subgraph in entry.subgraphs:
        inner = "; ".join(f"{entry_text(each)} of {[*inputs]}" for each, inputs in subgraph.nodes)
        text += f" runs ({inner}; returns {[*subgraph.outputs]})"
    return text


def _argument(value: Any) -> Any:
    """A static argument, or a stand-in for it whose text is equal in all processes."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return [_argument(item) for item in value]
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _placement(place: Placement, spec: Spec) -> str:
    if place.sharding is not None and place.manual is None:
        return mark_text(place.sharding)
    if place.jax_sharding is None:
        return "on the host"
    ndim = len(spec.shape) + (place.manual is not None)
    return sharding_text(place.jax_sharding, ndim)


def mark_text(sharding: Sharding) -> str:
    """A mark with its mesh; equal in all processes."""
    spec, mesh_shape = sharding.marked_spec, sharding.mesh.mesh_shape
    return f"{spec} over {mesh_shape} {sharding.text}{sharding.priority_text}"
