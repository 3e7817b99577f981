"""What `config.fold_layers = "auto"` chooses by platform, and how `explain_recompile` says it."""

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.program import folding
from spmd_core.runtime import devices


def model(num_layers=16):
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(num_layers))
    ).to("xla")


def train(layers):
    loss = layers(torch.ones(2, 4, device="xla")).square().sum()
    loss.backward()
    spmd.sync()
    return str(spmd.debugging.explain_recompile())


def test_where_auto_makes_loops(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", "auto")
    monkeypatch.setattr(folding, "choice", lambda _: folding.Choice(True, "a test says so"))
    text = train(model())
    assert '"auto" makes loops of repeated layers on cpu: a test says so.' in text
    assert "spmd.config.fold_layers made loops of 15 x" in text
    assert "made no loop: nothing is repeated" in train(model(2))
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    text = train(model(17))
    assert "made loops of 16 x" in text and "auto" not in text


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ("cpu", "steps of loops took up to 1.4 of the time of layers one by one there."),
        ("tpu", "the time of a step has not been measured there."),
        ("gpu", "neither time nor memory has been measured there."),
        ("neuron", "neither time nor memory has been measured there."),
    ],
)
def test_elsewhere_auto_makes_none(platform, why, monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", "auto")
    layers = model(18)
    monkeypatch.setattr(devices, "platform", lambda: platform)
    assert not folding.folds_layers()
    what = f"leaves layers one by one on {platform}: {why}"
    assert folding.explained() == f'spmd.config.fold_layers = "auto" {what}'
    monkeypatch.undo()
    monkeypatch.setattr(spmd.config, "fold_layers", "auto")
    monkeypatch.setattr(folding, "choice", lambda _: folding.Choice(False, "a test says so"))
    text = train(layers)
    assert "leaves layers one by one on cpu: a test says so." in text and "made" not in text


def test_the_default_says_nothing():
    assert spmd.config.fold_layers is False and not folding.folds_layers()
    assert folding.explained() == "" and "fold_layers" not in train(model(19))
    with pytest.raises(TypeError, match="takes False or True or 'auto'; got 'cpu', of type str"):
        spmd.config.fold_layers = "cpu"
