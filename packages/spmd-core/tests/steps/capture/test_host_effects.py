"""What a captured step does on the host is refused; random numbers of the device are drawn anew."""

import logging
import threading
import time
from datetime import datetime

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.errors import CaptureError


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


def repeat(step, times, *args):
    for _ in range(times):
        step(*args)


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


@pytest.mark.parametrize(
    ("make", "calls", "match"),
    [
        (lambda: lambda x: print("x") or x * 2, 1, r"print at .*test_host_effects.py:\d+"),
        (lambda: lambda x: x * torch.rand(3).to("xla"), 1, "torch on the CPU"),
        (lambda: lambda x: x * np.random.rand(), 1, "numpy.random"),
        (lambda: lambda x: x * float(x.sum()), 1, "needs a value"),
        (kept_list, 12, r"kept\[\d+\] is a tensor of shape \(3,\) in place of nothing"),
        (kept_elsewhere, 1, r"something keeps, float32\[3\]"),
        (counted, 12, r"state\['calls'\] is \d+ in place of"),
        (lambda: lambda x: x * time.perf_counter(), 1, r"clock at .*test_host_effects.py:\d+"),
        (lambda: lambda x: (datetime.now(), x * 2)[1], 1, r"clock at .*test_host_effects.py:\d+"),
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


def test_log_records_are_refused():
    logger = logging.getLogger("of a captured step")
    step = spmd.compile(lambda x: logger.warning("x") or x * 2, capture=True)
    with pytest.raises(CaptureError, match=r"log record at .*test_host_effects.py:\d+"):
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


def test_draws_by_another_thread_are_named():
    run, done = threading.Event(), threading.Event()

    def draw():
        run.wait()
        torch.rand(2, device="xla", generator=own)
        done.set()

    def step(x):
        if not run.is_set():
            run.set()
            done.wait()
        return x * torch.rand(3, device="xla")

    x = torch.ones(3).to("xla")
    for own in (None, torch.Generator()):
        run.clear()
        done.clear()
        thread = threading.Thread(target=draw, name="the loader")
        thread.start()
        call = spmd.compile(lambda x: step(x), capture=True)
        if own is None:
            with pytest.raises(CaptureError, match=r"draws by thread 'the loader'\. Pass .* own"):
                call(x)
        else:
            call(x)
        thread.join()
