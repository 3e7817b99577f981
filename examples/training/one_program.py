"""A recipe's step as one program, which Python records only until it is known."""

from collections.abc import Callable
from typing import TypeVar

import spmd_core as spmd
from examples.training.run_config import RunConfig

Step = TypeVar("Step", bound=Callable[..., object])


def one_program(config: RunConfig) -> Callable[[Step], Step]:
    """A decorator for a training step: on device `xla`, a captured step; in eager torch, nothing.

    A captured step gets what varies as arguments, returns what is logged, and computes on the
    device alone (`docs/guides/compiling.md`). Once two calls agree, later ones run their program.

    Args:
        config: its `capture` says whether to capture, or to record each call, and so does
            `recorded_because`.
    """
    if config.device != "xla":
        return lambda step: step
    capture = config.capture and not config.recorded_because()
    return lambda step: spmd.compile(step, full_graph=True, name="train", capture=capture)
