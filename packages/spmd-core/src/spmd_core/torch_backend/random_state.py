"""The state of randomness, as torch_xla's users set and restore it: it is the state of torch's CPU generator (`random_stream` says why)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def manual_seed(seed: int) -> None:
    """Seeds torch's CPU generator, from which every random operation on the device draws. CUDA's generators are left alone."""
    torch.default_generator.manual_seed(seed)


def get_rng_state() -> torch.Tensor:
    """The state, as a uint8 tensor on the CPU that `set_rng_state` takes."""
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor | int) -> None:
    """Sets the state: one that `get_rng_state` returned, or a seed.

    Raises:
        TypeError: neither of both.
    """
    if isinstance(state, torch.Tensor):
        torch.default_generator.set_state(state.cpu())
    elif isinstance(state, int) and not isinstance(state, bool):
        manual_seed(state)
    else:
        raise TypeError(
            f"a random state is a tensor from get_rng_state() or a seed (int); got {type(state).__name__}. Pass one of both."
        )


def as_seed() -> int:
    """The state as one number, which `set_rng_state` takes, in any process: drawn from the generator, which is seeded with it at once.

    For programs that store the state as a number. What is drawn after it is what is drawn after `set_rng_state` with it, not what would have
    been drawn without the call.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=torch.default_generator))
    manual_seed(seed)
    return seed


@contextmanager
def fork_rng(*, enabled: bool = True) -> Iterator[None]:
    """Whatever is drawn or seeded inside, the state is the same after as before. `enabled=False` does nothing."""
    before = get_rng_state()
    try:
        yield
    finally:
        if enabled:
            set_rng_state(before)
