"""Reads on the host that decide the shape of a result: each is counted, and said once."""

import warnings

import torch

from spmd_core import counters
from spmd_core.dispatch.transfer import to_host
from spmd_core.source_lines import user_frame
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

# Operations that have warned of a read on the host.
# Guarded by: the GIL; a race warns twice. Cleared by: nobody but the tests.
_warned: set[str] = set()


def read_for_shape(tensor: torch.Tensor, what: str, alternative: str) -> torch.Tensor:
    """The tensor on the host; counts the read, and warns at the first one of `what`."""
    counters.count("data_dependent_reads")
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"the shape of the result of {what} depends on the data, so the host reads "
            f"a tensor of shape {tuple(tensor.shape)}, which cuts the program and waits for it. "
            f"{alternative} Counted in the metrics as data_dependent_reads.",
            stacklevel=user_frame()[2],
        )
    return to_host(tensor) if isinstance(tensor, XLAShardedTensor) else tensor
