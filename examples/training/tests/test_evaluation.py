"""An evaluation gives the mean over its batches, and leaves the model as it was."""

import math

import pytest
import torch
from torch import nn

from examples.training.evaluation import evaluating, mean_loss, perplexity


def test_the_mean_of_the_batches_without_dropout_and_gradients() -> None:
    model = nn.Dropout(0.5)
    batches = [(torch.full((1, 3), value), torch.ones(1, 3)) for value in (1.0, 2.0, 6.0)]

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() and x.shape == y.shape == (3,)
        return (model(x) * y).mean()

    autocast = torch.autocast("cpu", enabled=False)
    assert mean_loss(model, batches, loss_of, autocast) == 3.0
    assert model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("is_training", [True, False])
def test_an_error_leaves_the_model_in_its_mode(is_training: bool) -> None:
    model = nn.Linear(1, 1).train(is_training)

    def fails() -> None:
        with evaluating(model):
            assert not model.training
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert model.training is is_training and torch.is_grad_enabled()


def test_the_perplexity_of_a_loss_that_exploded() -> None:
    assert (perplexity(0.0), perplexity(1e4)) == (1.0, math.inf)
