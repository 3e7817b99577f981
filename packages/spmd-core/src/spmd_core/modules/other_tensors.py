"""A module that has other tensors in place of its parameters and buffers for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def having(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Inside, the module has other tensors. What calls it again in backward belongs inside, too.

    `torch.func.functional_call` does the same for one call of most modules. It ends before
    a checkpoint in the module computes again; of a submodule with two names it leaves the other
    tensors behind; and recurrent modules do not read those that it sets.

    Args:
        module: is as it was afterwards.
        tensors: for each name of `named_parameters()` and `named_buffers()` the tensor that takes
            the place of that one.

    Yields:
        A function that returns what the module has by now in place of these tensors, by name:
        buffers to which its forward has assigned.
    """
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    assert {*names.values()} == tensors.keys()
    own: Any = [
        (table, key, tensor, names[id(tensor)])
        for each in module.modules()
        for table in (each._parameters, each._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]
    # A recurrent module reads its parameters from a list of its own.
    lists: Any = [(m, m._flat_weights) for m in module.modules() if isinstance(m, nn.RNNBase)]

    def assigned() -> dict[str, torch.Tensor]:
        now = ((name, table.get(key)) for table, key, _, name in own)
        return {name: tensor for name, tensor in now if tensor is not tensors[name]}

    try:
        for table, key, _, name in own:
            table[key] = tensors[name]
        for each, weights in lists:
            each.__dict__["_flat_weights"] = [
                tensors[names[id(w)]] if id(w) in names else w for w in weights
            ]
        yield assigned
    finally:
        for table, key, tensor, _ in own:
            table[key] = tensor
        for each, weights in lists:
            each.__dict__["_flat_weights"] = weights
