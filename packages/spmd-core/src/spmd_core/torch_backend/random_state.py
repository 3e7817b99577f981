"""The random state of device `xla`, which is that of torch's CPU generator.

`recording.random_stream` says why the device draws from this generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spmd_core.arguments import checked


@checked()
def manual_seed(seed: int) -> None:
    """Seeds torch's CPU generator, from which all random operations on the device draw.

    CUDA's generators are not seeded.

    Raises:
        ValueError: the seed has more than 64 bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(
            f"seed is a whole number of 64 bits, from -2**63 to 2**64 - 1; got {seed}. Write for "
            "instance seed=0."
        )
    torch.default_generator.manual_seed(seed)


def get_rng_state() -> torch.Tensor:
    """The state as a uint8 CPU tensor, for `set_rng_state`."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor | int) -> None:
    """Sets the state to a result of `get_rng_state`, or seeds the generator with an int.

    Raises:
        TypeError: `state` is neither a tensor nor an int.
    """
    if isinstance(state, torch.Tensor):
        torch.default_generator.set_state(state.cpu())
    elif isinstance(state, int) and not isinstance(state, bool):
        manual_seed(state)
    else:
        raise TypeError(
            "a random state is a tensor from get_rng_state() or a seed (int); "
            f"got {type(state).__name__}. Pass one of both."
        )


def as_seed() -> int:
    """Draws a seed from the generator, seeds the generator with it, and returns it.

    For programs that store the random state as a number: `set_rng_state` with this seed, in any
    process, restores the state after this call. Later draws differ from those without this call.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=torch.default_generator))
    manual_seed(seed)
    return seed


@checked()
@contextmanager
def fork_rng(*, enabled: bool = True) -> Iterator[None]:
    """Restores the random state at the end of the block. `enabled=False` does nothing."""
    before = get_rng_state()
    try:
        yield
    finally:
        if enabled:
            set_rng_state(before)
