"""Captured steps do what recorded ones do, whatever the user changes between two calls."""

import functools
import gc
import logging
import sys
import time
from datetime import datetime
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spmd_core as spmd
from spmd_core.errors import CaptureError


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


def repeat(step, times, *args):
    for _ in range(times):
        step(*args)


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


def test_tensors_of_the_cpu_are_arguments_too():
    @spmd.compile(capture=True)
    def double(x):
        return x.to("xla") * 2

    for i in range(5):
        assert double(torch.full((3,), float(i))).tolist() == [2.0 * i] * 3
    assert double.replayed == 3


def test_arguments_that_are_written_and_returned():
    @spmd.compile(capture=True)
    def add(total, x):
        total += x
        return total, total[1:], x.sum()

    total = torch.zeros(3).to("xla")
    for i in range(1, 6):
        same_total, part, added = add(total, torch.full((3,), float(i)).to("xla"))
        assert same_total is total and added.item() == 3 * i
        part.mul_(1)
        assert total.tolist() == [sum(range(i + 1))] * 3
    assert add.replayed >= 2


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


def test_counts_on_the_host_are_refused():
    model = nn.Linear(3, 3).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())

    @spmd.compile(capture=True)
    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"host: optimizer.state.*'step'\].*fused=True"):
        repeat(step, 4, torch.ones(2, 3).to("xla"))


def kept_list():
    kept = []
    return lambda x: kept.append(x * 2)


def kept_elsewhere():
    return lambda x: setattr(torch.nn, "kept_by_a_test", x * 2)


def counted():
    state = {"calls": 0}

    def step(x):
        state["calls"] += 1
        return x * 2

    return step


def with_iterator():
    items = iter([1.0, 2.0, 3.0])
    return lambda x: x * next(items)


@pytest.mark.parametrize(
    ("make", "calls", "match"),
    [
        (lambda: lambda x: print("x") or x * 2, 1, r"print at .*test_captured.py:\d+"),
        (lambda: lambda x: x * torch.rand(3).to("xla"), 1, "torch on the CPU"),
        (lambda: lambda x: x * np.random.rand(), 1, "numpy.random"),
        (lambda: lambda x: x * float(x.sum()), 1, "needs a value"),
        (kept_list, 12, r"kept\[\d+\] is a tensor of shape \(3,\) in place of nothing"),
        (kept_elsewhere, 1, r"something keeps, float32\[3\]"),
        (counted, 12, r"state\['calls'\] is \d+ in place of"),
        (lambda: lambda x: x * time.perf_counter(), 1, r"clock at .*test_captured.py:\d+"),
        (lambda: lambda x: (datetime.now(), x * 2)[1], 1, r"clock at .*test_captured.py:\d+"),
        (lambda: lambda x: (open(__file__).close(), x * 2)[1], 1, "file or process at"),
        (lambda: lambda x: spmd.add_step_closure(len, (x,)), 1, "add_step_closure inside"),
        (with_iterator, 1, "an iterator, of type list_iterator, at items"),
    ],
)
def test_what_no_replay_would_do_is_refused(make, calls, match, monkeypatch):
    monkeypatch.setattr(torch.nn, "kept_by_a_test", None, raising=False)
    step = spmd.compile(make(), capture=True)
    with pytest.raises(spmd.errors.SpmdError, match=match):
        repeat(step, calls, torch.ones(3).to("xla"))


def test_numbers_that_vary_without_an_argument_are_refused(monkeypatch):
    monkeypatch.setattr(torch.nn, "of_a_test", map(float, range(9)), raising=False)
    step = spmd.compile(lambda x: x * next(torch.nn.of_a_test), capture=True)
    x = torch.ones(3).to("xla")
    step(x)
    with pytest.raises(CaptureError, match=r"aten::mul.Tensor, recorded at .*:\d+.* got 0.0 and"):
        step(x)


def test_an_argument_that_is_state_as_well():
    first, second = (torch.full((3,), v).to("xla") for v in (1.0, 10.0))
    held = [first, second]

    @spmd.compile(capture=True)
    def grow(x):
        held[0].mul_(2)
        return x.sum()

    expected = [6.0, 12.0, 24.0, 48.0]
    assert [grow(first).item() for _ in range(4)] == expected
    assert [grow(second).item() for _ in range(4)] == [30.0] * 4
    third = torch.zeros(3).to("xla")
    assert [grow(third).item() for _ in range(4)] == [0.0] * 4
    assert held[0].tolist() == [2.0**12] * 3


def test_constants_of_a_step_are_kept():
    @spmd.compile(capture=True)
    def step(x):
        return x * torch.tensor([1.0, 2.0, 3.0], device="xla")

    for i in range(5):
        assert step(torch.full((3,), float(i)).to("xla")).tolist() == [i, 2.0 * i, 3.0 * i]
    assert step.replayed == 3


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


def test_zeros_have_signs():
    step = spmd.compile(lambda x, by: 1 / (x * by), capture=True)
    for by, expected in ((0.0, torch.inf), (-0.0, -torch.inf)):
        for _ in range(4):
            assert step(torch.ones(3).to("xla"), by).tolist() == [expected] * 3
    assert step.replayed == 4


def test_a_gradient_as_an_argument():
    w = torch.ones(3).to("xla").requires_grad_()
    w.grad = torch.full((3,), 2.0).to("xla")
    step = spmd.compile(lambda given: given.sum() + w.sum(), capture=True)
    for _ in range(4):
        assert step(w.grad).item() == 9.0
    for _ in range(3):
        assert step(torch.full((3,), 5.0).to("xla")).item() == 18.0


@pytest.mark.parametrize("order", [lambda lr: 2.0 if lr < 0.2 else 1.0, lambda lr: min(lr, 0.2)])
def test_numbers_of_groups_that_a_step_decides_by(order):
    w = torch.ones(3).to("xla").requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.5)

    @spmd.compile(capture=True)
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return x * order(optimizer.param_groups[0]["lr"])

    x = torch.ones(3).to("xla")

    def loop():
        for _ in range(6):
            rate = optimizer.param_groups[0]["lr"]
            assert step(x)[0].item() == pytest.approx(order(rate))
            optimizer.param_groups[0]["lr"] = rate * 0.7

    with pytest.raises(CaptureError, match="or comes from an optimizer's param_groups"):
        loop()


def test_a_schedule_of_an_own_optimizer():
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])

    w = torch.ones(3).to("xla").requires_grad_()
    optimizer = Plain([w])

    @spmd.compile(capture=True)
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()

    expected = torch.ones(3)
    for _ in range(6):
        step(torch.ones(3).to("xla"))
        expected -= optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(w.detach().cpu(), expected)
        optimizer.param_groups[0]["lr"] *= 0.7
    assert step.replayed == 4


def test_new_objects_as_arguments_are_refused():
    step = spmd.compile(lambda batch: batch.x * 2, capture=True)
    batches = [SimpleNamespace(x=torch.ones(3).to("xla")) for _ in range(9)]
    for batch in batches[:8]:
        step(batch)
    with pytest.raises(CaptureError, match=r"got new ones, of SimpleNamespace, in 9 calls\. Pass"):
        step(batches[8])
    passed = spmd.compile(lambda batch: batch["x"] * 2, capture=True)
    for _ in range(12):
        assert passed({"x": torch.ones(3).to("xla")}).tolist() == [2.0] * 3
    assert passed.replayed == 10


def test_tensors_that_something_keeps_are_refused():
    @functools.lru_cache
    def scale():
        return torch.full((3,), 2.0).to("xla")

    scale()
    step = spmd.compile(lambda x: x * scale(), capture=True)
    with pytest.raises(CaptureError, match=r"got one that something keeps, float32\[3\].*Pass it"):
        step(torch.ones(3).to("xla"))
    passed = spmd.compile(lambda x, by: x * by, capture=True)
    for _ in range(4):
        assert passed(torch.ones(3).to("xla"), scale()).tolist() == [2.0] * 3
        scale().mul_(1)


@pytest.mark.parametrize("cloned", [False, True])
def test_constants_that_are_returned(cloned):
    @spmd.compile(capture=True)
    def step(x):
        scale = torch.tensor([1.0, 2.0, 3.0], device="xla")
        return scale.clone() if cloned else scale, scale * x

    x = torch.ones(3).to("xla")
    if not cloned:
        with pytest.raises(CaptureError, match=r"return its clone\(\)"):
            step(x)
        return
    for _ in range(5):
        scale, product = step(x)
        scale.add_(1)
        assert scale.tolist() == [2.0, 3.0, 4.0] and product.tolist() == [1.0, 2.0, 3.0]
    assert step.replayed == 3


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


def test_a_parameter_that_a_step_makes():
    step = spmd.compile(lambda x: nn.Parameter(x * 2), capture=True)
    for _ in range(4):
        made = step(torch.ones(3).to("xla"))
        assert isinstance(made, nn.Parameter) and made.requires_grad
    assert step.replayed == 2


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


def test_a_write_after_another_program_moved_the_state(mesh_2d):
    w = torch.zeros(8, 8).to("xla")

    @spmd.compile(capture=True)
    def step(x):
        w.copy_(x * 2)

    split = torch.ones(8, 8).to("xla")
    spmd.mark_sharding(split, mesh_2d, ("a", "b"))
    for i in range(6):
        step(torch.full((8, 8), float(i)).to("xla"))
        assert (w + split).tolist() == [[2.0 * i + 1] * 8] * 8
        assert w.tolist() == [[2.0 * i] * 8] * 8
    assert step.replayed == 4


def test_log_records_are_refused():
    logger = logging.getLogger("of a captured step")
    step = spmd.compile(lambda x: logger.warning("x") or x * 2, capture=True)
    with pytest.raises(CaptureError, match=r"log record at .*test_captured.py:\d+"):
        step(torch.ones(3).to("xla"))


def test_generators_of_the_step():
    drawn = torch.Generator().manual_seed(3)
    step = spmd.compile(lambda x: x * torch.rand(3, device="xla", generator=drawn), capture=True)
    x = torch.ones(3).to("xla")
    first = [step(x).tolist() for _ in range(4)]
    drawn.manual_seed(3)
    assert [step(x).tolist() for _ in range(4)] == first and step.replayed == 6
    on_host = spmd.compile(lambda x: x * torch.rand(3, generator=drawn).to("xla"), capture=True)
    with pytest.raises(CaptureError, match=r"a generator of torch on the CPU\. Write torch"):
        on_host(x)


def test_what_is_returned_is_new_at_each_call():
    w = torch.full((3,), 5.0).to("xla").requires_grad_()

    @spmd.compile(capture=True)
    def step(x):
        w.grad = None
        (w * x).sum().backward()
        total = torch.zeros(3, device="xla")
        total += x
        return w.detach().clone(), torch.ones(3, device="xla"), total, w.grad, x.clone()

    kept = []
    for i in range(1, 7):
        results = step(torch.full((3,), float(i)).to("xla"))
        assert [r[0].item() for r in results] == [5.0, 1.0, i, i, i]
        kept.append(results[3])
        for r in (*results[:3], results[4]):
            r.add_(100)
    assert [grad[0].item() for grad in kept] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert w.tolist() == [5.0] * 3 and step.replayed == 4


def test_dropout_in_a_checkpoint(mesh_2d):
    results = []
    for capture in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).to("xla")
        spmd.mark_sharding(model[0].weight, mesh_2d, ("a", "b"))

        def step(x, model=model):
            model.zero_grad()
            checkpoint(model, x, use_reentrant=False).square().mean().backward()

        call = spmd.compile(step, capture=capture)
        grads = []
        for i in range(5):
            call(torch.full((8, 8), float(i + 1)).to("xla"))
            grads.append([p.grad.cpu() for p in model.parameters()])
        results.append(grads)
        assert not capture or call.replayed == 3
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
