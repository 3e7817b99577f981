"""Loops that never end a step: cut by themselves, with the same values, and said once."""

import warnings

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.dispatch import automatic_cut, router
from spmd_core.dispatch.eager import eager_mode_context
from spmd_core.errors import ProgramError
from spmd_core.graph import storage
from spmd_core.program import execution

counter = spmd.metrics.counter
SAID = r"a step ends with spmd.sync\(\) or a read; [\d,]+ operations were pending without one"


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """An eighth of the bounds, so that the programs are small."""
    for name in ("MIN_OPERATIONS", "MIN_STATELESS", "MAX_OPERATIONS"):
        monkeypatch.setattr(automatic_cut, name, getattr(automatic_cut, name) // 8)
    monkeypatch.setattr(storage, "PENDING_BLOCK", storage.PENDING_BLOCK // 8)


def watches() -> bool:
    return automatic_cut._installed() is not router.route


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).to(device)


def train(device, steps, *, mesh=None, end_step=lambda number: None):
    """The losses of some steps, as tensors that were never read, and the network."""
    model = network(device)
    for parameter in model.parameters() if mesh is not None else ():
        if parameter.dim() == 2:
            spmd.mark_sharding(parameter, mesh, (0, None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(5, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for number in range(steps):
        x = batches[number % 5].to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        end_step(number)
    return losses, model


def same_model(model, expected):
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-9, atol=1e-11)


def test_a_training_loop_becomes_one_program_a_step(mesh_1d):
    expected, theirs = train("cpu", 30)
    before = spmd.metrics.counters()
    with pytest.warns(UserWarning, match=SAID) as said:
        losses, model = train("xla", 30, mesh=mesh_1d)
    assert len(said) == 1
    assert watches()
    # All pieces share one program; the first whole step afterwards has other donations, and the
    # next one other results.
    assert counter("compiles") - before["compiles"] <= 3
    assert counter("automatic_cuts") >= 25
    same_model(model, theirs)
    torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(expected))
    assert all(p._handle.sharding is not None for p in model.parameters() if p.dim() == 2)


def test_a_loop_that_ends_its_steps_is_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("xla", 12, end_step=lambda number: spmd.sync() if number % 2 else None)
    assert counter("automatic_cuts") == 0 and not watches()


def test_a_long_step_that_ends_itself_is_looked_at_once(monkeypatch):
    looks = []
    look = automatic_cut._look
    monkeypatch.setattr(automatic_cut, "_look", lambda *given: (looks.append(1), look(*given)))
    x, counts = torch.ones(3).to("xla"), []
    for _ in range(4):
        results = [x * i for i in range(600)]
        spmd.sync()
        counts.append(len(looks))
    assert results and counts[0] > 0 and counts[-1] == counts[0]


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_a_sync_brings_the_router_back():
    _, model = train("xla", 20)
    assert watches() and (cut := counter("automatic_cuts"))
    spmd.sync()
    _, theirs = train("cpu", 20)
    same_model(model, theirs)
    assert not watches() and counter("automatic_cuts") == cut


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_another_program_after_the_loop_keeps_its_values():
    _, model = train("xla", 20)
    x = torch.ones(3, 3, dtype=torch.float64)
    ours = x.to("xla")
    for _ in range(30):
        x, ours = (x @ x).cos() * 0.5, (ours @ ours).cos() * 0.5
    _, theirs = train("cpu", 20)
    torch.testing.assert_close(ours.cpu(), x)
    same_model(model, theirs)


def test_layers_are_not_cut():
    x = torch.ones(4, 4).to("xla")
    weight = torch.eye(4).to("xla")
    for _ in range(60):
        x = torch.relu(x @ weight + 0.25) * 0.5
    assert counter("automatic_cuts") == 0
    torch.testing.assert_close(x.cpu(), torch.full((4, 4), 0.25))


def test_microsteps_of_one_step_are_not_cut():
    model = network("xla")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    spmd.sync()
    x = torch.ones(2, 8, dtype=torch.float64).to("xla")
    for _ in range(24):
        model(x).sum().backward()
    assert counter("automatic_cuts") == 0
    expected = network("cpu")
    (24 * expected(torch.ones(2, 8, dtype=torch.float64)).sum()).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_a_long_repetition_without_a_state_is_cut(monkeypatch):
    monkeypatch.setattr(automatic_cut, "MIN_STATELESS", 512)
    expected = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    x = expected.to("xla")
    for _ in range(400):
        x = (x.roll(1, 0) * 1.5).sin()
        expected = (expected.roll(1, 0) * 1.5).sin()
    assert counter("automatic_cuts") > 10
    torch.testing.assert_close(x.cpu(), expected)


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_views_and_several_results_pass_over_a_cut(monkeypatch):
    monkeypatch.setattr(automatic_cut, "MIN_STATELESS", 128)

    def run(device):
        x = torch.arange(12.0, dtype=torch.float64, device=device).reshape(3, 4)
        window = x[1:, ::2]
        for _ in range(60):
            top, places = x.sort(dim=1, descending=True)
            window.copy_(window.tanh() + top[:2, :2])
            x.div_(x.abs().max())
            x.add_(places.to(x.dtype), alpha=0.01)
        return x

    torch.testing.assert_close(run("xla").cpu(), run("cpu"))
    assert counter("automatic_cuts") > 0


def test_what_repeats_nothing_is_cut_at_a_bound(monkeypatch):
    monkeypatch.setattr(automatic_cut, "MAX_OPERATIONS", 200)

    def run(x):
        for number in range(300):  # primes have no period
            prime = number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
            x = torch.sin(x) if prime else torch.cos(x)
        return x

    with pytest.warns(UserWarning, match=rf"{SAID}, and run here now, with the same values"):
        x = run(torch.zeros(3).to("xla"))
    assert counter("automatic_cuts") == 0 and counter("cuts") == 1
    torch.testing.assert_close(x.cpu(), run(torch.zeros(3)))


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_a_failed_piece_loses_nothing(monkeypatch):
    monkeypatch.setattr(automatic_cut, "MIN_STATELESS", 128)
    run, failures = execution.execute, []

    def fails_once(live, **options):
        if len(failures) < 1 and counter("automatic_cuts") > 5:
            failures.append(len(live))
            raise ProgramError("no memory for this piece")
        return run(live, **options)

    monkeypatch.setattr(execution, "execute", fails_once)
    expected = torch.linspace(0, 1, 5, dtype=torch.float64)
    state = expected.to("xla")
    spmd.sync()
    for _ in range(100):
        expected.copy_(expected.sin() + 1)
        try:
            state.copy_(state.sin() + 1)
        except ProgramError:  # raised before its operation, which so can be repeated
            assert not watches()
            state.copy_(state.sin() + 1)
        expected.div_(2)
        state.div_(2)
    assert failures
    torch.testing.assert_close(state.cpu(), expected)


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_a_leaf_that_several_pieces_read_and_that_is_overwritten_later(monkeypatch):
    monkeypatch.setattr(automatic_cut, "MIN_STATELESS", 128)

    def run(device):
        weight = torch.linspace(0.5, 1, 9, dtype=torch.float64).reshape(3, 3).to(device)
        x = torch.ones(3, 3, dtype=torch.float64).to(device)
        spmd.sync()
        for _ in range(58):
            x.copy_((x @ weight).tanh())
        weight.mul_(2)  # all that is pending still reads its old value
        for _ in range(30):
            x.copy_((x @ weight).tanh())
        return x, weight

    for ours, theirs in zip(run("xla"), run("cpu")):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert counter("automatic_cuts") > 1


def test_a_compiled_region_is_left_alone():
    state = torch.ones(4, dtype=torch.float64).to("xla")

    @spmd.compile
    def run():
        for _ in range(100):
            state.mul_(0.5).add_(state.sin() * state.cos())

    run()
    assert counter("automatic_cuts") == 0 and not watches()
    expected = torch.ones(4, dtype=torch.float64)
    for _ in range(100):
        expected.mul_(0.5).add_(expected.sin() * expected.cos())
    torch.testing.assert_close(state.cpu(), expected)


@pytest.mark.filterwarnings("ignore:a step ends with")
def test_eager_mode_takes_over(monkeypatch):
    train("xla", 20)
    assert watches()
    with eager_mode_context(True):
        assert (torch.ones(3).to("xla") + 1).tolist() == [2.0] * 3
    (torch.ones(3).to("xla") + 1).tolist()
    assert not watches()
