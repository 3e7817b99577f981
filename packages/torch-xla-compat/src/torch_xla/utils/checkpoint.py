"""Gradient checkpointing with torch's own function, which works on the device.

Recomputation repeats the same random numbers.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from spmd_core.arguments import checked, require_callable


@checked()
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint` in its reentrant form.

    Raises:
        TypeError: `function` is none.
        ValueError: `use_reentrant` is False, or there are keyword arguments for the function.
    """
    require_callable("function", function)
    if kwargs:
        raise ValueError(
            "checkpoint passes positional arguments to the function; got the keywords "
            f"{', '.join(kwargs)}. Bind them with functools.partial."
        )
    if not use_reentrant:
        raise ValueError(
            "torch_xla.utils.checkpoint is reentrant; got use_reentrant=False. "
            "Call torch.utils.checkpoint.checkpoint(use_reentrant=False)."
        )
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=True, preserve_rng_state=preserve_rng_state
    )


CheckpointFunction = torch_checkpoint.CheckpointFunction
