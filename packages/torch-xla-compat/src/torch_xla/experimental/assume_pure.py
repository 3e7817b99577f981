"""`assume_pure`: functions that are said to depend on their arguments alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def assume_pure(
    fn: Callable[..., Any], *, add_rng_seed_argument: bool = False
) -> Callable[..., Any]:
    """A function that computes what `fn` does, with a seed for its random numbers if asked for.

    PyTorch/XLA calls `fn` once for each combination of shapes, and its program from then on. Here
    `fn` is called each time, so it need not be pure: its gradients, hooks and writes are those of
    `fn`. What it records is compared, and compiled once. `torch_xla.compile` skips the calls of a
    whole step.

    Args:
        fn: of tensors and other arguments.
        add_rng_seed_argument: whether the function takes a keyword `rng_seed`, an int, which
            decides its random numbers; those of other calls of torch do not depend on it.

    Raises:
        AssertionError: at a call, without `rng_seed` where it was asked for.
        TypeError: at a call, `rng_seed` is no int.

    Example:
        >>> import torch
        >>> noise = assume_pure(torch.rand_like, add_rng_seed_argument=True)
        >>> x = torch.zeros(3, device="xla")
        >>> bool((noise(x, rng_seed=1) == noise(x, rng_seed=1)).all())
        True
    """
    if not add_rng_seed_argument:

        @functools.wraps(fn)
        def same(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return same

    @functools.wraps(fn)
    def seeded(*args: Any, rng_seed: int | None = None, **kwargs: Any) -> Any:
        if rng_seed is None:
            raise AssertionError(
                "a function of assume_pure(add_rng_seed_argument=True) takes its seed by the "
                "keyword rng_seed; got none. Pass rng_seed=0, and another one in each step."
            )
        if isinstance(rng_seed, bool) or not isinstance(rng_seed, int):
            raise TypeError(
                f"rng_seed is an int; got {type(rng_seed).__name__}. Pass int(rng_seed)."
            )
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(rng_seed)
            return fn(*args, **kwargs)
        finally:
            generator.set_state(before)

    return seeded


class PureModule(nn.Module):
    """A module whose forward is said to depend on its arguments, parameters and buffers alone.

    Calls the module; see `assume_pure`.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return assume_pure(self._module)(*args, **kwargs)


def assume_pure_torch(func: Callable[..., Any], use_cache: bool = False) -> Callable[..., Any]:
    """A function that computes what `func` does, without gradients.

    Args:
        func: is called each time, as by `assume_pure`.
        use_cache: not used: what it records is compared, whatever its name.

    Raises:
        AssertionError: gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise AssertionError(
            "assume_pure_torch computes no gradients; got a function to decorate while they are "
            "enabled. Decorate it inside of torch.no_grad(), or use assume_pure."
        )

    @functools.wraps(func)
    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return func(*args, **kwargs)

    return without_gradients
