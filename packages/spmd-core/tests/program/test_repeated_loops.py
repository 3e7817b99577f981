"""Programs whose layers became loops compute what eager torch does, and the same dropout."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core import debugging, metrics

WIDTH, LAYERS, STEPS = 12, 6, 3


@pytest.fixture(autouse=True)
def folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    monkeypatch.setattr(spmd.config, "check_passes", True)


class Block(nn.Module):
    """A residual block with a norm, two layers, and dropout."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, self.dropout)


class Model(nn.Module):
    def __init__(self, *, width: int = WIDTH, layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


Prepare = Callable[[nn.Module], object]


def trained(
    model: nn.Module,
    device: str,
    *,
    prepare: Prepare = lambda model: None,
    rows: int = 8,
    dtype: torch.dtype | None = None,
    clip: float | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps with AdamW, and the parameters behind them."""
    model = copy.deepcopy(model).to(device)
    if device == "xla":
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(STEPS):
        x, y = (torch.randn(rows, n, generator=generator).to(device) for n in (4, 3))
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = (model(x) - y).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def num_programs_with_loops(since: int) -> list[Sequence[tuple[int, int]]]:
    return [record.loops for record in metrics.programs()[since:] if record.loops]


def check(
    model: nn.Module, *, loops: int = 2, atol: float = 1e-5, steps: int = LAYERS, **options
) -> None:
    """Asserts that training agrees with eager torch, in one program with loops."""
    right, right_parameters = trained(model, "cpu", **options)
    known = len(metrics.programs())
    ours, our_parameters = trained(model, "xla", **options)
    made = num_programs_with_loops(known)
    assert [[length for length, _ in each] for each in made] == [[steps] * loops]
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_parameters, right_parameters, rtol=1e-4, atol=atol)


def test_training(num_devices):
    torch.manual_seed(0)
    check(Model(), clip=0.5)


def test_what_became_loops_is_explained():
    model = Model(layers=12).to("xla")
    with torch.no_grad():
        model(torch.ones(2, 4).to("xla")).sum().item()
    assert metrics.programs()[-1].loops == ((12, 5),)
    assert "made loops of 12 x 5 operations" in str(debugging.explain_recompile())
    (torch.ones(5).to("xla") * 3).sum().item()
    assert "made no loop" in str(debugging.explain_recompile())


@pytest.mark.slow
def test_dropout_drops_the_same_as_one_by_one(monkeypatch):
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    folded, folded_parameters = trained(model, "xla")
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    one_by_one, parameters = trained(model, "xla")
    torch.testing.assert_close(folded, one_by_one, rtol=1e-6, atol=0)
    torch.testing.assert_close(folded_parameters, parameters, rtol=1e-4, atol=1e-5)


def test_dropped_elements_are_bit_for_bit_those_of_one_by_one(monkeypatch):
    def kept() -> torch.Tensor:
        torch.manual_seed(7)
        x = torch.ones(64, 64).to("xla")
        for _ in range(24):
            x = nn.functional.dropout(x, 0.02) * 0.98
        return x.cpu()

    folded = kept()
    assert metrics.programs()[-1].loops
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    one_by_one = kept()
    assert not metrics.programs()[-1].loops
    assert torch.equal(folded == 0, one_by_one == 0) and 0 < (folded == 0).sum() < 64 * 64


def test_recomputed_layers(num_devices):
    torch.manual_seed(0)

    def prepare(model):
        for layer in model.layers:
            spmd.checkpoint_module(layer)

    check(Model(), prepare=prepare)


def test_autocast():
    torch.manual_seed(0)
    model = Model()
    folded = trained(model, "xla", dtype=torch.bfloat16)
    right = trained(model, "cpu")
    torch.testing.assert_close(folded[0], right[0], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 13])
@pytest.mark.parametrize("spec", [("a", None), ("a", "b"), (None, ("a", "b"))])
def test_marks(mesh_2d, width, spec):
    torch.manual_seed(0)

    def prepare(model):
        for layer in model.layers:
            for part in (layer.up, layer.down):
                spmd.mark_sharding(part.weight, mesh_2d, spec)

    check(Model(width=width), prepare=prepare)


@pytest.mark.slow
def test_fully_sharded_layers(mesh_1d):
    torch.manual_seed(0)

    def prepare(model):
        for layer in model.layers:
            spmd.fully_shard(layer, mesh_1d, axis="x")
        spmd.fully_shard(model, mesh_1d, axis="x")

    check(Model(width=16), prepare=prepare, rows=16)


@pytest.mark.slow
def test_a_layer_that_differs_splits_the_loop():
    torch.manual_seed(0)
    model = Model(layers=17)
    model.layers[8] = nn.Sequential(Block(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    right, _ = trained(model, "cpu")
    known = len(metrics.programs())
    ours, _ = trained(model, "xla")
    (made,) = num_programs_with_loops(known)
    assert sorted(length for length, _ in made) == [8, 8, 9, 9]
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_layers_that_are_one_module():
    torch.manual_seed(0)
    model = Model(layers=1)
    model.layers = nn.ModuleList([model.layers[0]] * 8)
    right, right_parameters = trained(model, "cpu")
    ours, parameters = trained(model, "xla")
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parameters, right_parameters, rtol=1e-4, atol=1e-5)


def test_updates_in_a_loop_of_python():
    torch.manual_seed(0)
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    ours, target = x.to("xla"), y.to("xla")
    for i in range(40):
        x = x - 0.1 * (x - y) + i
        ours = ours - 0.1 * (ours - target) + i
    torch.testing.assert_close(ours.cpu(), x)
    assert [length for length, _ in metrics.programs()[-1].loops] == [40]


def test_a_forward_reads_the_parameters_that_a_training_step_has_stacked():
    torch.manual_seed(0)
    model = Model(layers=12).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    for _ in range(2):
        model(x.to("xla")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    spmd.sync()
    right = copy.deepcopy(model).to("cpu")
    with torch.no_grad():
        torch.testing.assert_close(model(x.to("xla")).cpu(), right(x), rtol=1e-5, atol=1e-5)
    assert [length for length, _ in metrics.programs()[-1].loops] == [12]


def test_a_parameter_that_is_assigned_anew_counts():
    torch.manual_seed(0)
    model = Model(layers=12).to("xla")
    x = torch.randn(8, 4)
    with torch.no_grad():
        model(x.to("xla")).cpu()
        model.layers[2].up.weight.copy_(torch.ones(2 * WIDTH, WIDTH))
        right = copy.deepcopy(model).to("cpu")
        torch.testing.assert_close(model(x.to("xla")).cpu(), right(x), rtol=1e-5, atol=1e-5)
        model.load_state_dict(Model(layers=12).state_dict())
        right = copy.deepcopy(model).to("cpu")
        torch.testing.assert_close(model(x.to("xla")).cpu(), right(x), rtol=1e-5, atol=1e-5)
