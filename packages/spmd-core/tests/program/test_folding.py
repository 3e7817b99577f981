"""What `config.fold_layers = "auto"` chooses, and how `explain_recompile` says it."""

import copy

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


def gathered(*args):
    return True


def test_where_auto_makes_loops(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", "auto")
    monkeypatch.setattr(folding, "choice", lambda _: folding.Choice(True, "a test says so"))
    monkeypatch.setattr(folding, "gathers_weights", gathered)
    text = train(model())
    assert '"auto" makes loops of repeated layers in this program on cpu: a test says so.' in text
    assert "spmd.config.fold_layers made loops of 15 x" in text
    assert "made no loop: nothing is repeated" in train(model(2))
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    text = train(model(17))
    assert "made loops of 16 x" in text and "auto" not in text


def test_loops_with_fsdp(num_devices):
    """By default on CPUs: where the batch's axis splits the weights. Losses are eager torch's."""
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("fsdp", "tensor"))
    tokens = torch.randint(16, (num_devices, 6))
    for batch, weights, makes in (
        ("fsdp", ("fsdp", None), "makes loops of repeated layers"),
        ("fsdp", ("fsdp", "tensor"), "makes loops of repeated layers"),
        ("fsdp", ("tensor", None), "leaves layers one by one"),
        ("fsdp", (None, None), "leaves layers one by one"),
        (None, ("fsdp", None), "leaves layers one by one"),
    ):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(12))
        layers = nn.Sequential(nn.Embedding(16, 16), *blocks)
        losses = {}
        for device in ("cpu", "xla"):
            own = copy.deepcopy(layers).to(device)
            x = tokens.to(device)
            if device == "xla":
                spmd.mark_sharding(x, mesh, (batch,))
                for parameter in own.parameters():
                    spmd.mark_sharding(parameter, mesh, weights[: parameter.dim()])
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
            losses[device] = []
            for _ in range(3):
                loss = own(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[device].append(loss.item())
        torch.testing.assert_close(losses["xla"], losses["cpu"], rtol=1e-5, atol=1e-6)
        text = str(spmd.debugging.explain_recompile())
        assert f'"auto" {makes} in this program on cpu' in text, (weights, text)
        assert ("made loops of" in text) == makes.startswith("makes"), text


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ("tpu", "the time of a step has not been measured there."),
        ("gpu", "neither time nor memory has been measured there."),
        ("neuron", "neither time nor memory has been measured there."),
    ],
)
def test_elsewhere_auto_makes_none(platform, why, monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", "auto")
    monkeypatch.setattr(folding, "gathers_weights", gathered)
    monkeypatch.setattr(devices, "platform", lambda: platform)
    assert not folding.folds_layers([])
    what = f"leaves layers one by one in this program on {platform}: {why}"
    assert folding.explained(255, folds=False) == ""
    assert folding.explained(256, folds=False) == f'spmd.config.fold_layers = "auto" {what}'


def test_other_settings_say_nothing(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    assert not folding.folds_layers([])
    assert folding.explained(256, folds=False) == "" and "fold_layers" not in train(model(19))
    with pytest.raises(TypeError, match="takes False or True or 'auto'; got 'cpu', of type str"):
        spmd.config.fold_layers = "cpu"
