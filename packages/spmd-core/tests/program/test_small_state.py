"""Small tensors that a captured step updates alike are rows of stacks, whoever else uses them."""

import gc

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.graph.stacks import Row
from spmd_core.program import small_state

COUNT = small_state.FEWEST


class Loop:
    """A step over small weights, and what it computes; captured on the device, or eager."""

    def __init__(self, device, *, count=COUNT, shape=(3,), mark=lambda tensor: None, **options):
        self.device = device
        data = torch.linspace(0.1, 1, count * torch.Size(shape).numel()).reshape(count, *shape)
        self.weights = [nn.Parameter(row.clone().to(device)) for row in data]
        for weight in self.weights:
            mark(weight)
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.1, fused=True, **options)
        weights, optimizer = self.weights, self.optimizer

        def step(x):
            loss = torch.stack([(w * x).square().sum() for w in weights]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.step = self.captured(step)

    def captured(self, step):
        return spmd.compile(step, capture=True) if self.device == "xla" else step

    def call(self, value=1.0):
        self.step(torch.full((), value).to(self.device))
        if self.device == "xla":
            spmd.sync()

    def values(self):
        state = [x for s in self.optimizer.state.values() for x in s.values()]
        return [x.detach().cpu() for x in (*self.weights, *state)]


def both(use, **options):
    """The captured loop, after the same calls as an eager one; their values are compared."""
    mark = options.pop("mark", lambda tensor: None)
    ours, theirs = Loop("xla", mark=mark, **options), Loop("cpu", **options)
    use(ours)
    use(theirs)
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return ours


def num_inputs(step):
    (replay,) = {r for kind in step._kinds.values() for r in kind.replays}
    return len(replay._program.graph.leaves)


def calls(loop, *values):
    for value in values:
        loop.call(value)


@pytest.mark.parametrize(
    ("count", "shape", "inputs"),
    [
        (COUNT, (3,), 5),
        (COUNT, (), 5),
        (COUNT - 1, (3,), 1 + 4 * (COUNT - 1)),
        (COUNT, (32, 33), 2 + 3 * COUNT),  # the counters alone are small
    ],
)
def test_one_input_for_small_tensors_of_one_form(count, shape, inputs):
    before = spmd.metrics.counter("compiles")
    loop = both(lambda loop: calls(loop, 1.0, 0.5, 2.0, 1.0), count=count, shape=shape)
    assert (loop.step.recorded, loop.step.replayed) == (2, 2)
    assert num_inputs(loop.step) == inputs
    assert spmd.metrics.counter("compiles") == before + 1


@pytest.mark.parametrize("shape", [(8, 4), (5, 3)])
@pytest.mark.parametrize("spec", [("a", None), ("b", "a"), (("a", "b"), None), (None, None)])
def test_marked_tensors(mesh_2d, shape, spec):
    loop = both(
        lambda loop: calls(loop, 1.0, 0.5, 2.0, 1.0),
        shape=shape,
        mark=lambda tensor: spmd.mark_sharding(tensor, mesh_2d, spec),
    )
    assert loop.step.replayed == 2 and num_inputs(loop.step) == 5
    assert all(w.sharding_spec == loop.weights[0].sharding_spec for w in loop.weights)


def test_small_state_lies_in_stacks_where_layers_may_become_loops(monkeypatch):
    monkeypatch.setattr(spmd.config, "fold_layers", True)
    loop = both(lambda loop: calls(loop, 1.0, 2.0, 3.0))
    assert num_inputs(loop.step) == 5


def test_tensors_of_the_host_and_of_the_device():
    ours = Loop("xla", shape=(5,))
    with torch.no_grad():
        for weight in ours.weights[::2]:
            weight.add_(0)
    spmd.sync()
    before = spmd.metrics.counter("compiles")
    calls(ours, 1.0, 1.0, 1.0)
    assert spmd.metrics.counter("compiles") == before + 1 and num_inputs(ours.step) == 5


def write_one(loop):
    loop.weights[2].mul_(2)


def copy_one(loop):
    loop.weights[1].copy_(torch.full((3,), 0.25))


def load(loop):
    for i, weight in enumerate(loop.weights):
        weight.copy_(torch.full((3,), i / 4))


def swap(loop):
    first, second = loop.weights[0].clone(), loop.weights[1].clone()
    loop.weights[0].copy_(second)
    loop.weights[1].copy_(first)


def share(loop):
    loop.weights[0].copy_(loop.weights[1])


def write_a_view(loop):
    loop.weights[3][1:].zero_()


def read(loop):
    assert all(w.sum().isfinite() for w in loop.weights)


@pytest.mark.parametrize("change", [write_one, copy_one, load, swap, share, write_a_view, read])
def test_others_write_rows(change):
    def use(loop):
        for value in (1.0, 0.5, 2.0, 1.0, 0.5):
            loop.call(value)
            with torch.no_grad():
                change(loop)
        calls(loop, 1.0, 1.0)

    loop = both(use)
    assert loop.step.recorded <= 3 and loop.step.replayed >= 4


def test_steps_that_share_rows():
    """One updates all rows, one only reads some, one updates some."""

    def use(loop):
        halves = loop.weights[: COUNT // 2], loop.weights[COUNT // 2 :]
        seen = []

        def total():
            return torch.stack([w.sum() for w in halves[1]]).sum()

        def shrink():
            with torch.no_grad():
                for weight in halves[0]:
                    weight.mul_(0.5)

        total, shrink = loop.captured(total), loop.captured(shrink)
        for _ in range(4):
            loop.call()
            seen.append(total().detach().cpu().clone())
            shrink()
        loop.weights.append(nn.Parameter(torch.stack(seen)))
        if loop.device == "xla":
            assert min(loop.step.replayed, total.replayed, shrink.replayed) >= 1

    both(use)


def test_rows_as_arguments():
    def use(loop):
        seen = []

        def scaled(w):
            return w * 3

        def grow(w):
            with torch.no_grad():
                w.add_(1)

        scaled, grow = loop.captured(scaled), loop.captured(grow)
        for i in range(5):
            loop.call()
            seen.append(scaled(loop.weights[i % 2]).detach().cpu().clone())
            grow(loop.weights[3])
        loop.weights.append(nn.Parameter(torch.stack(seen)))
        if loop.device == "xla":
            assert scaled.replayed >= 1 and grow.replayed >= 1 and loop.step.replayed >= 1

    both(use)


def test_arguments_and_gradients_are_no_rows():
    weights = [nn.Parameter(torch.ones(3).to("xla")) for _ in range(COUNT)]
    totals = [torch.zeros(3).to("xla") for _ in range(COUNT)]

    @spmd.compile(capture=True)
    def step(*totals):
        torch.stack([w.square().sum() for w in weights]).sum().backward()
        for total, weight in zip(totals, weights):
            total.add_(weight.grad)

    for _ in range(4):
        step(*totals)
    spmd.sync()
    assert step.replayed >= 1
    assert all(t.tolist() == [2.0 + 4.0 + 6.0 + 8.0] * 3 for t in totals)
    assert all(w.grad.tolist() == [8.0] * 3 for w in weights)
    found = [t._handle.storage.value.data for t in (*totals, *(w.grad for w in weights))]
    assert not any(isinstance(data, Row) for data in found)


def test_rows_whose_tensors_are_gone():
    loop = Loop("xla")
    calls(loop, 1.0, 1.0, 1.0)
    last = loop.weights[-1]
    expected = [w.detach().cpu() for w in loop.weights]
    loop.step = loop.optimizer = loop.weights = None
    gc.collect()
    double = spmd.compile(lambda: last * 2, capture=True)
    for _ in range(3):
        torch.testing.assert_close(double().cpu(), expected[-1] * 2, rtol=0, atol=0)
    assert double.replayed == 1


def test_loaded_state_has_stacks_of_its_own():
    """All tensors have one form, but not one role."""
    first = Loop("cpu", shape=())
    calls(first, 1.0)
    state = first.optimizer.state_dict()

    def use(loop):
        loop.optimizer.load_state_dict(state)
        calls(loop, 1.0, 1.0, 1.0, 1.0)

    loop = both(use, shape=())
    assert num_inputs(loop.step) == 5
