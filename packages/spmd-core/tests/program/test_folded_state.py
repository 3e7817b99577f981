"""Layers as loops: where their parameters and state lie as a program of the user goes on.

Each test does the same in eager torch, compares all that there is, and counts the programs that are
compiled and the stacks that are made.
"""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.metrics import counter
from spmd_core.program import compile_cache, layer_stacks, stacked_state

DEPTH, WIDTH = 8, 12
OF_A_BLOCK = 6  # parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of blocks between two layers; the first ones may be left out."""

    def __init__(self, blocks=None, skipped=0):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks, self.skipped = (
            blocks or nn.Sequential(*(Block() for _ in range(DEPTH))),
            skipped,
        )

    def forward(self, x):
        return self.last(self.blocks[self.skipped :](self.first(x)))


@pytest.fixture(autouse=True)
def folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd.config, "fold_layers", True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each stack had that was made before a program started."""
    numbers: list[int] = []
    make = stacked_state.make

    def counted(found, targets):
        numbers.extend(map(len, found.new.values()))
        make(found, targets)

    monkeypatch.setattr(stacked_state, "make", counted)
    return numbers


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Pair:
    """A model on the device and the same in eager torch."""

    def __init__(self, make=Model, optimizer=adam):
        torch.manual_seed(0)
        theirs = make()
        self.models = copy.deepcopy(theirs).to("xla"), theirs
        self.make_optimizer = optimizer
        self.new_optimizers()

    def new_optimizers(self):
        self.optimizers = tuple(map(self.make_optimizer, self.models))

    def both(self, use):
        """Does something with both, compares what it returns, and counts what was compiled."""
        before = counter("compiles")
        ours, theirs = (use(m, o) for m, o in zip(self.models, self.optimizers))
        spmd.sync()
        compiled = counter("compiles") - before
        if ours is not None:
            assert_close([ours], [theirs])
        return compiled

    def train(self, number=0, rows=5):
        return self.both(lambda model, optimizer: train(model, optimizer, number, rows))

    def evaluate(self):
        def use(model, _):
            with torch.no_grad():
                return model(batch_of(model, 99))

        return self.both(use)

    def compare(self):
        assert_close(*(model.parameters() for model in self.models))
        for name in ("exp_avg", "exp_avg_sq"):
            assert_close(*([s[name] for s in o.state.values()] for o in self.optimizers))


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


def batch_of(model, number, rows=5):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))
    return x.to(next(model.parameters()).device)


def train(model, optimizer, number=0, rows=5):
    optimizer.zero_grad()
    loss = model(batch_of(model, number, rows)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("is_trained_first", [True, False])
def test_training_and_evaluation_have_one_program_each(is_trained_first, made):
    """An evaluation before the first step is not worth stacks, so the later ones have another."""
    compile_cache.clear()
    pair = Pair()
    steps = [pair.train, pair.evaluate][:: 1 if is_trained_first else -1]
    assert [step() for step in steps] == [1, 1] and made == [DEPTH] * OF_A_BLOCK
    compiled = [step() for _ in range(3) for step in steps]
    assert compiled == [0 if is_trained_first else 1, *[0] * 5]
    pair.compare()
    assert made == [DEPTH] * OF_A_BLOCK


def test_reads_within_a_step_compile_nothing_later():
    pair = Pair()

    def use(model, optimizer):
        optimizer.zero_grad()
        for number in range(2):
            model(batch_of(model, number)).square().mean().backward()
            if number == 0 and next(model.parameters()).device.type == "xla":
                spmd.sync()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.item() > 0
        optimizer.step()
        return model.blocks[3].up.weight + model.blocks[2].up.weight.grad

    pair.both(use)
    assert [pair.both(use) for _ in range(3)] == [0, 0, 0]
    pair.compare()


@pytest.mark.parametrize("is_whole", [True, False])
def test_loaded_parameters_are_stacked_again_and_compile_nothing(is_whole, made):
    pair = Pair()
    state = copy.deepcopy(pair.models[1].state_dict())
    pair.train()
    pair.train(1)
    for number in range(2, 4):
        for model in pair.models:
            if is_whole:
                model.load_state_dict(state)
            else:  # one of a stack, from the host
                weight = model.blocks[3].up.weight
                weight.data = state["blocks.3.up.weight"].clone().to(weight.device)
        del made[:]
        assert pair.train(number) == 0
        assert made == [DEPTH] * (OF_A_BLOCK if is_whole else 1)
    assert pair.train(4) == 0
    pair.compare()


def test_a_layer_that_is_frozen_later_leaves_one_more_program():
    pair = Pair(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    pair.train()
    for model in pair.models:
        for layer in (model.first, *model.blocks[:-2]):
            layer.requires_grad_(False)
    pair.train(1)
    assert [pair.train(number) for number in range(2, 5)] == [0, 0, 0]
    assert_close(*(model.parameters() for model in pair.models))


def test_models_that_share_layers_do_not_copy_them_for_ever(made, monkeypatch):
    monkeypatch.setattr(layer_stacks, "_MOST_MADE", 2)
    compile_cache.clear()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = Model()
            self.part = Model(self.whole.blocks, skipped=2)

        def forward(self, x):
            return self.whole(x)

    pair = Pair(Both)

    def in_turns(model, optimizer):
        losses = []
        for part in (model.whole, model.part):
            losses.append(train(part, optimizer, 1))
            if losses[-1].device.type == "xla":
                spmd.sync()
        return torch.stack(losses)

    for _ in range(4):
        pair.both(in_turns)
    del made[:]
    assert [pair.both(in_turns) for _ in range(3)] == [0, 0, 0]
    assert made == []
    assert_close(*(model.parameters() for model in pair.models))


def test_a_stack_that_is_made_again_after_many_programs_is_made(made, monkeypatch):
    monkeypatch.setattr(layer_stacks, "_MOST_MADE", 2)
    monkeypatch.setattr(layer_stacks, "_SOON", 0)
    compile_cache.clear()
    pair = Pair()
    state = copy.deepcopy(pair.models[1].state_dict())
    for number in range(4):
        for model in pair.models:
            model.load_state_dict(state)
        pair.train(number)
    assert made == [DEPTH] * OF_A_BLOCK * 4


def test_sizes_that_vary_share_a_program_of_layers_one_by_one():
    pair = Pair()
    for number, rows in enumerate((5, 3, 7)):
        pair.train(number, rows)
    assert [pair.train(number, rows) for number, rows in enumerate((4, 6, 5, 7), 3)] == [0] * 4
    pair.compare()


def test_a_cache_that_grows_shares_a_program():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH))

        def forward(self, x, caches):
            for i, layer in enumerate(self.keys):
                q, k, v = layer(x).chunk(3, -1)
                if caches[i] is not None:
                    k, v = (torch.cat(pair, 0) for pair in zip(caches[i], (k, v)))
                caches[i] = k, v
                x = x + (q @ k.t()).softmax(-1) @ v
            return x[-1:]

    torch.manual_seed(0)
    theirs = Decoder()
    ours = copy.deepcopy(theirs).to("xla")

    def decode(model, steps=8):
        x, caches, found = torch.linspace(0, 1, 3 * WIDTH).view(3, WIDTH), [None] * DEPTH, []
        x = x.to(next(model.parameters()).device)
        with torch.no_grad():
            for _ in range(steps):
                x = model(x, caches).tanh()
                if x.device.type == "xla":
                    spmd.sync()
                found.append(x)
        return torch.cat([x.cpu() for x in found])

    before = counter("compiles")
    assert_close([decode(ours)], [decode(theirs)])
    assert counter("compiles") - before <= 4
    before = counter("compiles")
    assert_close([decode(ours, 20)], [decode(theirs, 20)])
    assert counter("compiles") == before


def test_why_each_size_has_a_program_is_said_of_layers_in_stacks():
    layers = nn.Sequential(*(nn.Conv1d(2, 2, 3, padding=1) for _ in range(60))).to("xla")
    with torch.no_grad():
        for n in (5, 6, 7):
            y = layers(torch.ones(1, 2, n).to("xla"))
            spmd.sync()
    assert y.shape[-1] == 7
    report = spmd.debugging.explain_recompile()
    assert "made loops of 60 x" in str(report)
    note = "Each size has a program of its own: a convolution along a dim that grows."
    assert report.note == note


@pytest.mark.skipif("spmd.global_runtime_device_count() < 2")
def test_layers_that_have_run_as_a_loop_are_sharded_automatically():
    pair = Pair(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    pair.train()
    (model, _), (optimizer, _) = pair.models, pair.optimizers
    x = batch_of(model, 1, 64)
    plan = spmd.auto_shard(lambda x: model(x).square().mean().backward(), x, candidates=0)
    assert plan
    optimizer.zero_grad()
    pair.train(1, 64)
    pair.train(2, 64)
    assert_close(*(m.parameters() for m in pair.models))
