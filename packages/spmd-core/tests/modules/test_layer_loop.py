"""Tests spmd_core.modules.layer_loop: a function of layers that are called as one."""

import torch
from torch import nn

from spmd_core.modules.layer_loop import run_layers


def test_a_function_of_each_layer():
    """The layer that the function gets has the tensors of each; it returns what is stacked."""
    torch.manual_seed(0)
    for count in (1, 3):
        layers = [nn.Linear(2, 2) for _ in range(count)]
        x, scales = torch.randn(3, 2), torch.arange(1.0, count + 1)
        expected, sums = x, []
        for layer, scale in zip(layers, scales, strict=True):
            expected = layer(expected) * scale
            sums.append(layer.weight.sum())
        layers = [layer.to("xla") for layer in layers]
        weights, seen = [layer.weight for layer in layers], []

        def step(layer, carry, scale, rows, seen=seen):
            assert not rows
            seen.append(layer)
            return layer(carry) * scale, {"sum": layer.weight.sum(), "nothing": None}

        result, ys, states = run_layers(layers, step, x.to("xla"), scales.to("xla"))
        assert not states
        assert set(seen) == {layers[0]} and ys["nothing"] is None
        assert all(a.weight is b for a, b in zip(layers, weights, strict=True))
        torch.testing.assert_close(result.detach().cpu(), expected.detach())
        torch.testing.assert_close(ys["sum"].detach().cpu(), torch.stack(sums).detach())
