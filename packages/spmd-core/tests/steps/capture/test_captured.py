"""Captured steps do what recorded ones do, whatever the user changes between two calls."""

import gc
import sys
from contextlib import nullcontext

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import spmd_core as spmd
from spmd_core.program import small_state


@pytest.fixture(autouse=True)
def small_stacks(monkeypatch):
    """Here, two tensors are enough for a stack of small state."""
    monkeypatch.setattr(small_state, "FEWEST", 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.outer = nn.Linear(8, 4)
        self.scale = 1.0

    def forward(self, x):
        return self.outer(self.drop(self.norm(self.inner(x)).tanh())) * self.scale


class Run:
    """A training loop: a model, an optimizer, a step over both, and what the user keeps."""

    def __init__(self, capture, mesh=None, **options):
        torch.manual_seed(0)
        self.model = Net().to("xla")
        if mesh is not None:
            spmd.mark_sharding(self.model.inner.weight, mesh, ("a", "b"))
            spmd.mark_sharding(self.model.outer.weight, mesh, ("b", None))
        made = torch.optim.AdamW if options.pop("adam", True) else torch.optim.SGD
        self.optimizer = made(self.model.parameters(), lr=0.05, fused=True, **options)
        self.weights = {"loss": 1.0}
        self.kept = []
        self.seen = []
        model, optimizer, weights = self.model, self.optimizer, self.weights

        def step(x, target, *, clip=None):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), target) * weights["loss"]
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            return {"loss": loss, "size": x.shape[0]}

        self.step = spmd.compile(step, capture=True) if capture else step
        torch.manual_seed(1)
        self.random = torch.get_rng_state()

    def call(self, size=16, seed=0, **options):
        torch.set_rng_state(self.random)
        data = torch.Generator().manual_seed(seed)
        x = torch.randn(size, 6, generator=data).to("xla")
        target = torch.randn(size, 4, generator=data)
        result = self.step(x, target.to("xla"), **options)
        spmd.sync()
        self.random = torch.get_rng_state()
        self.seen += [result["loss"].detach(), result["size"]]

    def values(self):
        tensors = [*self.model.state_dict().values(), *self.kept]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors += [t for t in self.seen if isinstance(t, torch.Tensor)]
        return [t.detach().cpu() for t in tensors]


def halve_the_rate(run):
    run.optimizer.param_groups[0]["lr"] *= 0.5


def no_decay(run):
    run.optimizer.param_groups[0]["weight_decay"] = 0.0


def evaluate(run):
    run.model.train(not run.model.training)


def drop_more(run):
    run.model.drop.p = 0.5


def scale(run):
    run.model.scale = run.model.scale + 0.5


def weigh(run):
    run.weights["loss"] = 0.25


def write(run):
    with torch.no_grad():
        run.model.outer.weight.mul_(0.5)


def replace_data(run):
    run.model.outer.bias.data = torch.ones(4).to("xla")


def replace_parameter(run):
    run.model.outer.bias = nn.Parameter(torch.ones(4).to("xla"))


def load(run):
    run.model.load_state_dict({k: v.cpu() + 1 for k, v in run.model.state_dict().items()})


def freeze(run):
    run.model.inner.bias.requires_grad_(not run.model.inner.bias.requires_grad)


def drop_gradients(run):
    run.optimizer.zero_grad()


def keep_gradients(run):
    run.kept += [p.grad for p in run.model.parameters() if p.grad is not None][:2]


def keep_views(run):
    run.kept += [run.model.inner.weight.t()[0], run.model.norm.running_mean]


def keep_copies(run):
    run.kept += [run.model.inner.weight.clone(), run.model.outer.bias.detach() * 2]


def swap_activation(run):
    run.model.drop = nn.Identity()


def hook(run):
    run.model.outer.register_forward_hook(lambda module, given, result: result * 2)


def seed_anew(run):
    run.random = torch.Generator().manual_seed(7).get_state()


def mark(run):
    mesh = spmd.Mesh(range(spmd.metrics.global_device_count()), (-1,), ("x",))
    spmd.mark_sharding(run.model.norm.weight, mesh, ("x",))


CHANGES = (
    halve_the_rate, no_decay, evaluate, drop_more, scale, weigh, write, replace_data,
    replace_parameter, load, freeze, drop_gradients, keep_gradients, keep_views, keep_copies,
    swap_activation, hook, seed_anew,
)  # fmt: skip


def same(ours, theirs):
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    sizes = [[x for x in run.seen if isinstance(x, int)] for run in (ours, theirs)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("options", [{}, {"adam": False, "momentum": 0.9}, {"amsgrad": True}])
def test_a_loop_with_a_schedule(mesh_2d, options):
    runs = [Run(capture, mesh_2d, **options) for capture in (True, False)]
    for run in runs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
        for i in range(7):
            run.call(seed=i)
            scheduler.step()
    same(*runs)
    step = runs[0].step
    assert step.recorded <= 4 and step.replayed == 7 - step.recorded


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls(mesh_2d, change):
    runs = [Run(capture, mesh_2d) for capture in (True, False)]
    for run in runs:
        for i in range(4):
            run.call(seed=i)
        change(run)
        for i in range(4):
            run.call(seed=10 + i)
    same(*runs)
    assert runs[0].step.replayed >= 2


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 3)), min_size=2, max_size=4))
def test_any_changes(changes):
    runs = [Run(capture) for capture in (True, False)]
    for run in runs:
        for n, (change, calls) in enumerate(changes):
            for i in range(calls):
                run.call(size=8, seed=10 * n + i)
            change(run)
        run.call(size=8)
    same(*runs)


def test_other_arguments_are_other_programs():
    runs = [Run(capture) for capture in (True, False)]
    for run in runs:
        for i in range(3):
            run.call(size=16, seed=i)
            run.call(size=12, seed=i)
            run.call(size=12, seed=i, clip=0.5)
    same(*runs)
    assert runs[0].step.replayed > 0


def test_the_reason_of_a_recording():
    run = Run(True)
    for i in range(4):
        run.call(seed=i)
    recorded = run.step.recorded
    evaluate(run)
    run.call()
    assert run.step.recorded == recorded + 1
    assert run.step.reason.startswith("model.training is False in place of True")


def test_what_autograd_saved_is_noticed():
    w = torch.ones(3).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def grow():
        with torch.no_grad():
            w.mul_(2)

    for _ in range(3):
        grow()
    loss = (w * w).sum()
    grow()
    assert grow.replayed == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pending_work_of_the_caller_comes_first():
    w = torch.ones(3).to("xla")

    @spmd.compile(capture=True)
    def grow():
        w.mul_(2)

    for _ in range(3):
        grow()
    before = w + 1  # pending, and reads what the next call takes over
    w.add_(1)
    grow()
    assert grow.replayed == 2 and before.tolist() == [9.0] * 3 and w.tolist() == [18.0] * 3


def test_gradients_that_add_up():
    w = torch.ones(3).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def accumulate(x):
        (w * x).sum().backward()

    for i in range(1, 6):
        accumulate(torch.full((3,), float(i)).to("xla"))
        assert w.grad.tolist() == [sum(range(i + 1))] * 3
    w.grad = None
    accumulate(torch.ones(3).to("xla"))
    assert w.grad.tolist() == [1.0] * 3 and accumulate.replayed >= 2


def test_a_method_and_its_object():
    class Counter:
        def __init__(self):
            self.by, self.total = 1.0, torch.zeros(2).to("xla")

        def step(self):
            self.total += self.by

    counter = Counter()
    step = spmd.compile(counter.step, capture=True)
    for _ in range(4):
        step()
    counter.by = 10.0
    for _ in range(3):
        step()
    assert counter.total.tolist() == [34.0] * 2 and step.replayed >= 3


FACTOR = 2.0


def scaled(x):
    return x * FACTOR


def test_globals_of_functions_that_are_called(monkeypatch):
    step = spmd.compile(lambda x: scaled(x), capture=True)
    x = torch.ones(2).to("xla")
    assert [step(x)[0].item() for _ in range(3)] == [2.0] * 3
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert [step(x)[0].item() for _ in range(3)] == [3.0] * 3
    assert step.replayed == 2


def test_a_failure_loses_nothing(monkeypatch):
    run = Run(True)
    for i in range(4):
        run.call(seed=i)
    before = [v.clone() for v in run.values()]

    def fails(*args):
        raise spmd.errors.ProgramError("no")

    kind = next(k for k in run.step._kinds.values() if k.replays)
    with monkeypatch.context() as patch:
        patch.setattr(type(kind.replays[0]._program), "run", fails)
        with pytest.raises(spmd.errors.ProgramError, match="no"):
            run.call(seed=9)
    for a, b in zip(run.values(), before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    run.call(seed=9)


def test_closures_at_the_end_of_a_step_come_first():
    by = {"scale": 2.0}
    step = spmd.compile(lambda x: x * by["scale"], capture=True)
    x = torch.ones(3).to("xla")
    for _ in range(3):
        step(x)
    pending = x + 1
    spmd.add_step_closure(lambda: by.update(scale=3.0))
    assert step(x).tolist() == [3.0] * 3 and pending.tolist() == [2.0] * 3


def test_modes_that_see_operations():
    w = torch.ones(3, 3).to("xla")
    step = spmd.compile(lambda x: x @ w, capture=True)
    x = torch.ones(2, 3).to("xla")
    for _ in range(3):
        step(x)
    with FlopCounterMode(display=False) as counted:
        step(x)
    assert counted.get_total_flops() == 2 * 2 * 3 * 3


def test_an_interruption_of_a_recorded_call():
    run = Run(True)
    for i in range(4):
        run.call(seed=i)

    def interrupt(*args):
        raise KeyboardInterrupt

    around = sys.stdout, sys.getprofile(), spmd.config.record_source_lines
    hooked = run.model.outer.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.call(seed=4)
    assert around == (sys.stdout, sys.getprofile(), spmd.config.record_source_lines)
    hooked.remove()
    for i in range(4, 8):
        run.call(seed=i)
    assert run.step.replayed > 2


def test_nothing_is_kept_of_earlier_calls():
    run = Run(True)
    counts = []
    for i in range(24):
        run.call(seed=i)
        run.seen.clear()
        if i in (7, 23):
            gc.collect()
            counts.append((len(jax.live_arrays()), len(run.step._kinds)))
    assert counts[0] == counts[1]


def test_a_block_is_not_captured():
    x = torch.ones(3).to("xla")
    step = spmd.compile(lambda x: x * 2, capture=True)
    for made in (spmd.compile(capture=True), step):
        with (
            pytest.raises(TypeError, match=r"for a function.*got a `with` block.*for a block"),
            made,
        ):
            pass
    with spmd.compile():
        y = x * 2
    assert y.tolist() == step(x).tolist() == [2.0] * 3


class Doubled(TorchDispatchMode):
    """Doubles what sines are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


def saved_twice_as_large():
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)


@pytest.mark.parametrize("mode", [Doubled, saved_twice_as_large, torch.no_grad])
def test_what_is_switched_on_around_some_calls(mode):
    found = []
    for capture in (True, False):
        w = torch.ones(3).to("xla").requires_grad_()

        def step(x, w=w):
            y = (w * x).sin()
            if y.requires_grad:
                w.grad = None
                y.sum().backward()
            return y

        call = spmd.compile(step, capture=capture)
        for i in range(18):
            with mode() if i % 6 > 2 else nullcontext():
                y = call(torch.full((3,), float(i)).to("xla"))
            found.append((y.tolist(), w.grad.tolist()))
        assert not capture or call.replayed >= 7
    assert found[:18] == found[18:]
