"""Seeds of random operations: each draws one from torch's CPU generator, and the device expands it.

Therefore `torch.manual_seed`, `get_rng_state`, `fork_rng`, `torch.Generator` and the replay of
`torch.utils.checkpoint` work as on the CPU. The seed is an input of the program, so a new seed
compiles nothing. Threads share torch's generator, as on the CPU: which thread draws which seed
depends on their order, unless each passes a generator of its own. The values do not depend on the
mesh, as the device's generator (threefry, counter based) computes each element from the seed and
the element's global position.

In a manual region, a random operation on local tensors draws other numbers on each device, which
folds its position into the key.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from spmd_core.graph.recorders import lock

# The tensor into which seeds are drawn.
# Guarded by: the graph lock. Cleared by: never: holds nothing between draws.
_cell = torch.empty((), dtype=torch.int64)
_MAX = 2**63 - 1


@dataclass(eq=False)
class Draws:
    """The seeds that are drawn while a thread listens.

    Attributes:
        own: those of that thread, each behind its generator, which is None for the default one.
        others: of draws by other threads, the generator and the thread's name.
    """

    own: list[tuple[torch.Generator | None, int]] = field(default_factory=list)
    others: list[tuple[torch.Generator | None, str]] = field(default_factory=list)


# Of the threads that listen.
# Guarded by: the graph lock. Cleared by: the end of `listening`.
_listeners: list[Draws] = []


def draw(generator: torch.Generator | None = None) -> int:
    """A seed in [0, 2**63 - 1) from `generator`, or from torch's default generator."""
    # In place, on an existing tensor: `with torch.device(...)` and other modes do not affect it.
    with lock:
        seed = int(_cell.random_(0, _MAX, generator=generator))
        for draws in _listeners:
            if draws is not position.draws:
                draws.others.append((generator, threading.current_thread().name))
    if position.draws is not None:
        position.draws.own.append((generator, seed))
    return seed


class _Position(threading.local):
    """What random operations of a thread mix into their keys beside the seed, and who listens.

    Attributes:
        make: gives a 0-dim integer tensor, for example one that is local to a manual region; None
            outside of `mixing`.
        draws: gets the seeds that are drawn; None outside of `listening`.
    """

    make: Callable[[], torch.Tensor] | None = None
    draws: Draws | None = None


# What random operations mix into their keys.
# Guarded by: thread-local storage. Cleared by: the end of `mixing`.
position = _Position()


@contextmanager
def mixing(tensor: torch.Tensor | Callable[[], torch.Tensor]) -> Iterator[None]:
    """Inside, random operations of this thread mix the value of a tensor into their keys.

    Equal seeds then give different numbers for each value, which may differ from device to device.

    Args:
        tensor: 0-dim, of integers, on device `xla`, local to the manual region whose tensors the
            operations take; or a function that makes it, which each random operation calls.
    """
    make = (lambda: tensor) if isinstance(tensor, torch.Tensor) else tensor
    around, position.make = position.make, make
    try:
        yield
    finally:
        position.make = around


@contextmanager
def listening() -> Iterator[Draws]:
    """Yields the seeds that this thread, and others meanwhile, draw inside."""
    around, draws = position.draws, Draws()
    with lock:
        _listeners.append(draws)
    position.draws = draws
    try:
        yield draws
    finally:
        position.draws = around
        with lock:
            _listeners.remove(draws)


def advanced(state: torch.Tensor, number: int) -> torch.Tensor:
    """The state of torch's default generator after so many seeds were drawn from a given state."""
    generator = torch.Generator()
    generator.set_state(state)
    for _ in range(number):
        torch.empty((), dtype=torch.int64).random_(0, _MAX, generator=generator)
    return generator.get_state()
