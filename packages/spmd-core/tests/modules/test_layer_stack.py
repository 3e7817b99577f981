"""Tests spmd_core.modules.layer_stack: which layers of a list are one stack."""

import copy

import torch
from torch import nn

from spmd_core.modules.layer_stack import ATTRIBUTE, LayerStack


def test_the_layers_of_a_list_as_it_is():
    container = nn.ModuleList(nn.Tanh() for _ in range(4))
    stack = LayerStack("layers", container)
    for layer in container:
        layer.__dict__[ATTRIBUTE] = stack
    first, last = container[0], container[3]
    assert stack.layers(first) == [*container] and stack.layers(nn.Tanh()) == []
    container[1] = nn.Tanh()
    assert stack.layers(first) == [first] and stack.layers(last) == [*container[2:]]
    copied = copy.deepcopy(container)
    assert copied[0].__dict__[ATTRIBUTE].layers(copied[2]) == [*copied[2:]]
    assert copy.deepcopy(first).__dict__[ATTRIBUTE] is None
    del container
    assert stack.layers(first) == []
    assert stack.call(first, first.forward, (torch.zeros(2, device="xla"),), {}).sum().item() == 0
