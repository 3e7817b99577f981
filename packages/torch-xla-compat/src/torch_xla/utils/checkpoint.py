"""Gradient checkpointing: torch's own works on the device, with randomness replayed."""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` in its reentrant form. ValueError for the other form, and for unknown keywords."""
    if kwargs:
        raise ValueError(
            f"checkpoint passes positional arguments to the function; got the keywords {', '.join(kwargs)}. Bind them with functools.partial."
        )
    if not use_reentrant:
        raise ValueError(
            "torch_xla.utils.checkpoint is reentrant; got use_reentrant=False. Call torch.utils.checkpoint.checkpoint(use_reentrant=False)."
        )
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state
    )


CheckpointFunction = torch_checkpoint.CheckpointFunction
