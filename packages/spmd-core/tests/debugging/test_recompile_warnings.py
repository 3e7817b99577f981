"""A line that compiles in almost every step is warned of once; what settles is not."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.debugging import recompile_warnings

pytestmark = pytest.mark.one_device


@pytest.fixture(autouse=True)
def _warned(monkeypatch):
    monkeypatch.setattr(spmd.config, "warn_of_recompiles", True)
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)
    recompile_warnings.clear()


def steps(sizes, width=8, model=None):
    """A training step for each size of the batch."""
    model = nn.Linear(width, 2).to("xla") if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for n in sizes:
        model(torch.ones(n, width).to("xla")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spmd.sync()


def test_a_batch_that_varies_is_warned_of_once():
    with pytest.warns(RuntimeWarning, match="4 programs in a row") as found:
        steps([9, 12, 7, 10, 8, 11, 13, 6, 5])
    assert len(found) == 1
    text = str(found[0].message)
    # The line, what changed, what to do, and how to be left alone.
    assert "test_recompile_warnings.py" in text and "-> float32[" in text
    assert "drop_last=True" in text and "config.warn_of_recompiles = False" in text
    assert found[0].filename == __file__


def test_the_advice_is_enough():
    """Padded to one size, and with sizes that share a program."""
    steps([16] * 9)
    spmd.config.bound_growing_sizes = True
    steps([9, 12, 7, 10, 8, 11, 13, 6, 5])
    spmd.config.bound_growing_sizes = False
    spmd.config.warn_of_recompiles = False
    steps([9, 12, 7, 10, 8, 11, 13, 6, 5], width=3)


def test_an_argument_that_varies_is_warned_of():
    x = torch.ones(16).to("xla")

    def rolled():
        for i in range(8):
            x.roll(i + 1).sum().item()

    with pytest.warns(RuntimeWarning, match="argument 'shifts'") as found:
        rolled()
    assert len(found) == 1 and "Keep it the same from step to step" in str(found[0].message)


def test_a_split_batch_that_varies_says_why(mesh_1d, num_devices):
    if num_devices == 1:
        pytest.skip("one device splits nothing")
    spmd.config.bound_growing_sizes = True

    def summed():
        for n in (3, 5, 4, 7, 6, 9):
            x = torch.ones(n * num_devices, 2).to("xla")
            spmd.mark_sharding(x, mesh_1d, ("x", None))
            x.sum().item()

    def trained():
        model = nn.Linear(8, 4).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for n in (3, 5, 4, 7, 6, 9):
            x = torch.ones(n * num_devices, 8).to("xla")
            spmd.mark_sharding(x, mesh_1d, ("x", None))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            spmd.sync()

    for loop in (summed, trained):
        with pytest.warns(RuntimeWarning, match="4 programs in a row") as found:
            loop()
        text = str(found[0].message)
        assert "dim 0 varies in size, and is split over devices by x" in text
        assert "share a program only if one size varies, along a dim that no device splits" in text
        assert "Pad batches and sequences to one size or a few" in text


def test_what_settles_is_not_warned_of():
    # The first steps, evaluation, and a smaller last batch.
    model = nn.Linear(8, 2).to("xla")
    for _ in range(3):
        steps([16, 16, 16, 5], model=model)
        with torch.no_grad():
            for n in (32, 32, 7):
                model(torch.ones(n, 8).to("xla")).sum().item()
    # Several models at one line, each of which takes some steps; a few sizes that return.
    for width in (3, 4, 5, 6, 7, 9):
        steps([16, 16, 16], width=width)
    for _ in range(4):
        steps([3, 4, 2], model=model)


def test_operations_that_differ_are_places_of_their_own():
    x = torch.ones(8).to("xla")
    for function in (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sqrt, torch.neg):
        function(x).sum().item()


@pytest.mark.parametrize("size", range(3, 10))
def test_a_test_has_places_of_its_own(size):
    assert torch.ones(size, 2).to("xla").sum().item() == 2 * size
