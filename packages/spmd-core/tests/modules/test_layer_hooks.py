"""Tests spmd_core.modules.layer_hooks: hooks that look, and hooks that change."""

import torch
from torch import nn

from spmd_core.modules import layer_hooks


def test_hooks_that_look_and_hooks_that_change():
    layer, x, seen = nn.Linear(2, 2), torch.ones(2), []
    assert not layer_hooks.any_of(layer)
    layer.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda m, args, out: seen.append(out))
    layer.register_forward_hook(lambda m, args, kwargs, out: out, with_kwargs=True)
    assert layer_hooks.any_of(layer)
    assert not layer_hooks.change_arguments(layer, (x,), {"a": 1})
    assert not layer_hooks.change_result(layer, (x,), {}, x)
    assert seen[0] == {"a": 1} and seen[1] is x
    with layer_hooks.without(layer):
        layer(x)
        assert not layer_hooks.any_of(layer) and len(seen) == 2
    changing = layer.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    assert layer_hooks.change_arguments(layer, (x,), {})
    changing.remove()
    layer.register_forward_hook(lambda m, args, out: out + 1)
    assert layer_hooks.change_result(layer, (x,), {}, x)
