"""Programs whose layers became loops compute what eager torch does, and the same dropout."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from tiers import crossed, exhaustive
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


class Gated(nn.Module):
    """A gated layer of two activations, with a mask that all layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(2 * WIDTH, 2 * WIDTH, device=x.device).tril()[3]
        opened = nn.functional.silu(self.gate(x)) * mask
        return x + self.down(opened * nn.functional.gelu(self.up(x), approximate="tanh"))


def test_activations_that_are_computed_again(num_devices):
    torch.manual_seed(0)
    layers = (Gated() for _ in range(LAYERS))
    check(nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Linear(WIDTH, 3)))


def test_what_became_loops_is_explained():
    model = Model(layers=12).to("xla")
    with torch.no_grad():
        model(torch.ones(2, 4).to("xla")).sum().item()
    assert metrics.programs()[-1].loops == ((12, 5),)
    assert "made loops of 12 x 5 operations" in str(debugging.explain_recompile())
    (torch.ones(5).to("xla") * 3).sum().item()
    assert "made no loop: nothing is repeated" in str(debugging.explain_recompile())


@pytest.mark.slow
def test_dropout_drops_the_same_as_one_by_one(monkeypatch):
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    folded, folded_parameters = trained(model, "xla")
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    one_by_one, parameters = trained(model, "xla")
    torch.testing.assert_close(folded, one_by_one, rtol=1e-6, atol=0)
    torch.testing.assert_close(folded_parameters, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
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
@pytest.mark.parametrize(
    ("width", "spec"), crossed([16, 13], [("a", None), ("a", "b"), (None, ("a", "b"))])
)
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


class Attention(nn.Module):
    """A block of a language model: causal attention and a layer behind it, each with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.dropout = nn.Linear(width, width), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.heads(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.functional.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        y = self.mlp(nn.functional.gelu(self.norms[1](x)))
        return x + nn.functional.dropout(y, self.dropout)

    def heads(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.qkv(self.norms[0](x)).chunk(3, -1)


class Language(nn.Module):
    """A language model whose last layer has the embedding's weight."""

    def __init__(self, *, layers: int = 5, width: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, width), nn.Embedding(7, width)
        self.layers = nn.ModuleList(Attention(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.t()


def language_steps(
    model: Language,
    device: str,
    *,
    rows: int = 6,
    parts: int = 1,
    prepare: Prepare = lambda model: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps over batches in parts, whose gradients add up; the parameters."""
    model = copy.deepcopy(model).to(device)
    if device == "xla":
        prepare(model)
    # The gradient of the keys' bias is zero but for rounding, which a small eps would blow up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(parts):
            tokens = torch.randint(11, (rows, 8), generator=generator).to(device)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / parts
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def agree(ours, right, *, atol: float = 2e-4) -> None:
    torch.testing.assert_close(ours[0], right[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], right[1], rtol=1e-3, atol=atol)


@pytest.mark.exhaustive  # test_dropout_drops_the_same_as_one_by_one
@pytest.mark.slow
def test_a_language_model_with_dropout_is_the_same_as_one_by_one(monkeypatch):
    """In one process, with loops and then without: the latter finds no parameter in a stack."""
    torch.manual_seed(0)
    model = Language()
    known = len(metrics.programs())
    folded = language_steps(model, "xla", parts=2)
    assert num_programs_with_loops(known)
    known = len(metrics.programs())
    monkeypatch.setattr(spmd.config, "fold_layers", False)
    one_by_one = language_steps(model, "xla", parts=2)
    assert not num_programs_with_loops(known)
    agree(folded, one_by_one)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "axes"),
    [exhaustive(8, ("a", None)), exhaustive(6, ("a", "b")), (5, (None, ("a", "b")))],
)
def test_a_language_model_over_two_axes_agrees_with_eager_torch(mesh_2d, rows, axes):
    """With the sum of the gradients of two parts, and with recomputed layers."""
    torch.manual_seed(0)
    model = Language(dropout=0.0)

    def prepare(model):
        for layer in model.layers:
            spmd.mark_sharding(layer.qkv.weight, mesh_2d, axes)
            spmd.mark_sharding(layer.out.weight, mesh_2d, axes[::-1])
            spmd.checkpoint_module(layer)
        spmd.mark_sharding(model.tokens.weight, mesh_2d, (("a", "b"), None))

    known = len(metrics.programs())
    ours = language_steps(model, "xla", rows=rows, parts=2, prepare=prepare)
    assert num_programs_with_loops(known)
    agree(ours, language_steps(model, "cpu", rows=rows, parts=2))


class Scanned(Model):
    """The same model with its layers as a loop that the user asked for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(spmd.scan_layers(self.layers, self.first(x)))


def memory(monkeypatch: pytest.MonkeyPatch, model: Model, is_on: bool) -> tuple[int, int]:
    """The bytes of the arguments of a training step, and its peak."""
    monkeypatch.setattr(spmd.config, "fold_layers", is_on)
    known = len(metrics.programs())
    trained(model, "xla", rows=64, clip=0.5)
    record = max(metrics.programs()[known:], key=lambda record: record.argument_bytes)
    assert bool(record.loops) == is_on
    return record.argument_bytes, record.peak_bytes


@pytest.mark.slow
def test_loops_hold_no_second_copy_of_the_parameters(monkeypatch):
    options = {"width": 48, "layers": 8}
    arguments, peak = memory(monkeypatch, Model(**options), is_on=True)
    assert arguments == memory(monkeypatch, Model(**options), is_on=False)[0]
    assert peak <= 1.02 * memory(monkeypatch, Scanned(**options), is_on=False)[1]


@pytest.mark.slow
def test_captured_steps_run_the_program_with_loops():
    torch.manual_seed(0)
    model = Model(layers=6)
    copied = copy.deepcopy(model)

    def losses(model: nn.Module, device: str) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=device == "xla")

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = spmd.compile(step, capture=True) if device == "xla" else step
        generator = torch.Generator().manual_seed(1)
        return [float(run(torch.randn(8, 4, generator=generator).to(device))) for _ in range(6)]

    known = len(metrics.programs())
    ours = losses(model.to("xla"), "xla")
    assert num_programs_with_loops(known)
    torch.testing.assert_close(ours, losses(copied, "cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        (lambda: [nn.Linear(4, 4)] * 2, "nothing is repeated 4 times in a row"),
        (lambda: [nn.Linear(4, 4) for _ in range(6)], "would save 5 operations, fewer than 48"),
        (lambda: [nn.Linear(4, 4), nn.Linear(4, 4)] * 5, "cannot lie in one array"),
    ],
)
def test_why_there_is_no_loop_is_explained(layers, why):
    with torch.no_grad():
        nn.Sequential(*layers()).to("xla")(torch.ones(2, 4).to("xla")).sum().item()
    assert not metrics.programs()[-1].loops
    assert why in str(debugging.explain_recompile())


def test_an_iteration_that_reads_an_earlier_result_in_place_of_a_row_is_in_another_loop():
    torch.manual_seed(0)
    values = [torch.randn(3, 5) for _ in range(80)]

    def run(values: list[torch.Tensor]) -> torch.Tensor:
        x = early = values[0]
        for i, value in enumerate(values[1:]):
            x = torch.tanh(x + (early if i == 60 else value))
            early = x if i == 2 else early
        return x

    ours = run([value.to("xla") for value in values])
    torch.testing.assert_close(ours.cpu(), run(values))
    assert metrics.programs()[-1].loops
