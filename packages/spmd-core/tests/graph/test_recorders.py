"""A pending graph for each thread: a step of one thread leaves the steps of the others alone."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.dispatch import automatic_cut, router
from spmd_core.graph import recorders, storage, values
from spmd_core.program import compile_cache, execution

counter = spmd.metrics.counter


class Worker:
    """Another thread, which runs one function after the other and lives until the test's end."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, function, *args):
        return self._pool.submit(function, *args).result(60)

    def end(self):
        self._pool.shutdown()


@pytest.fixture
def worker():
    spmd.sync()
    made = Worker()
    yield made
    made.end()
    spmd.sync()


def is_pending(t):
    return t._handle.value.data is None


def doubled(x):
    return x * 2


def batches(seed, steps):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, 6, 5, generator=generator, dtype=torch.float64)


def network(width):
    torch.manual_seed(width)
    layers = nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5)
    return nn.Sequential(*layers).double()


def train(model, data, device, *, mark=None, pause=lambda: None):
    """The losses of some steps, and the model; `pause` is called where a step is half recorded."""
    model = model.to(device)
    if mark is not None:
        mark(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in data:
        x = x.to(device)
        loss = (model(x) - x).square().mean()
        pause()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if device == "xla":
            spmd.sync()
            pause()
    return torch.stack(losses).cpu(), [p.detach().cpu() for p in model.parameters()]


def test_threads_train_models_of_their_own(mesh_1d, mesh_2d, monkeypatch):
    """Each cuts while all others are in the middle of a step."""
    steps, widths = 4, (8, 8, 11, 8)

    def mark_rows(model):  # 8 of them, and 11, which no axis divides
        spmd.mark_sharding(model[0].weight, mesh_1d, ("x", None))

    def mark_both(model):
        spmd.mark_sharding(model[0].weight, mesh_2d, ("a", "b"))
        spmd.mark_sharding(model[2].weight, mesh_2d, ("b", None))

    marks = (mark_rows, mark_both, mark_rows, mark_rows)
    models = [network(width) for width in widths]
    data = [batches(seed, steps) for seed in range(len(widths))]
    meet = threading.Barrier(len(widths), timeout=100)

    def run(model, data, mark):
        try:
            return train(model, data, "xla", mark=mark, pause=meet.wait)
        except BaseException:
            meet.abort()
            raise

    expected = [train(network(w), x, "cpu") for w, x in zip(widths, data)]
    gc.collect()  # what earlier tests left pending
    spmd.sync()
    compiles, executions = counter("compiles"), counter("executions")
    # Widths that other tests compiled for do not make these programs ones for many sizes.
    monkeypatch.setattr(spmd.config, "bound_growing_sizes", False)
    with ThreadPoolExecutor(len(widths)) as pool:
        found = list(pool.map(run, models, data, marks))
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    # Three kinds of models, as the first and the last thread share programs: for each a step, and
    # the read of its stacked losses.
    compiled = list(compile_cache.history)[-int(counter("compiles") - compiles) :]
    names = [(each.record.name, each.record.source) for each in compiled]
    assert len({each.key for each in compiled}) <= 3 * 2, names
    assert counter("executions") - executions == len(widths) * (steps + 1)


def test_threads_that_meet_an_operation_at_once_record_the_same(monkeypatch):
    """Programs are compared by the identity of their entries: else each thread compiles its own."""
    router.forget()
    meet, make_handler = threading.Barrier(2, timeout=100), router._make_handler

    def both_make(func):
        if func is torch.ops.aten.sinh.default:
            meet.wait()
        return make_handler(func)

    def run(x):
        y = torch.sinh(x)
        return y._handle.value.entry, y.cpu()

    given = [torch.ones(3, 4).to("xla") for _ in range(2)]
    monkeypatch.setattr(router, "_make_handler", both_make)
    with ThreadPoolExecutor(2) as pool:
        (one, first), (other, second) = pool.map(run, given)
    assert one is other
    assert torch.equal(first, second)


def test_a_cut_computes_what_its_thread_recorded(worker):
    x = torch.ones(3).to("xla")
    ours, theirs = x + 1, worker(doubled, x)
    worker(spmd.sync)
    assert is_pending(ours) and not is_pending(theirs)
    theirs = worker(doubled, x)
    spmd.sync()
    assert not is_pending(ours) and is_pending(theirs)
    assert theirs.tolist() == [2.0] * 3


def test_a_value_that_another_thread_reads_is_computed_with_what_it_depends_on(worker):
    x = torch.arange(3.0).to("xla")
    hidden = worker(torch.exp, x)
    theirs = worker(doubled, hidden)
    unrelated = worker(doubled, x)
    ours = theirs + x
    expected = x.cpu().exp() * 2 + x.cpu()
    torch.testing.assert_close(ours.cpu(), expected)
    names = [node.entry.name for node in compile_cache.newest().graph.nodes]
    assert names == ["aten::exp", "aten::mul.Tensor", "aten::add.Tensor"]
    assert not is_pending(hidden) and not is_pending(theirs) and is_pending(unrelated)
    executions = counter("executions")
    torch.testing.assert_close(theirs.cpu(), expected - x.cpu())
    assert counter("executions") == executions  # it was computed by our program
    worker(spmd.sync)
    assert not is_pending(unrelated) and unrelated.tolist() == [0.0, 2.0, 4.0]


def test_one_of_several_results_joins_the_cut_of_another_thread(worker):
    x = torch.tensor([3.0, 1.0, 2.0]).to("xla")
    ordered, order = worker(torch.sort, x)
    assert (ordered + 1).tolist() == [2.0, 3.0, 4.0]
    assert not is_pending(ordered) and not is_pending(order) and order.tolist() == [1, 2, 0]


def test_a_write_leaves_what_another_thread_has_read(worker):
    """And the buffer of what it has read is kept until that is computed."""
    w = torch.ones(4).to("xla")
    spmd.sync()
    execution.place(w._handle)
    theirs = worker(doubled, w)
    donated = counter("donated_bytes")
    w.add_(1)
    spmd.sync()
    assert counter("donated_bytes") == donated and is_pending(theirs)
    w.add_(1)
    spmd.sync()
    assert counter("donated_bytes") == donated + 16  # nobody reads this one
    view = worker(lambda: w[1:])
    assert theirs.tolist() == [2.0] * 4 and w.tolist() == [3.0] * 4
    w.mul_(2)
    assert worker(view.tolist) == [6.0] * 3  # a view sees every write


def test_what_one_thread_makes_and_another_one_trains(worker):
    """The parameters, which no cut has computed, follow the thread that writes them."""
    model, data = network(7), batches(0, 3)
    expected = train(network(7), data, "cpu")
    with torch.no_grad():
        model = model.to("xla")
        for parameter in model.parameters():
            parameter.mul_(2).div_(2)
    weight = model[0].weight
    assert is_pending(weight)
    found = worker(train, model, data, "xla")
    assert not is_pending(weight) and not storage.pending()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_thread_that_has_ended_leaves_its_values_to_the_next_cut():
    x, made = torch.ones(3).to("xla"), []
    thread = threading.Thread(target=lambda: made.append(x + 4))
    thread.start()
    thread.join()
    assert is_pending(made[0]) and made[0]._handle in storage.pending()
    spmd.sync()
    assert not is_pending(made[0]) and made[0].tolist() == [5.0] * 3
    before = len(recorders._recorders)
    for _ in range(3):
        thread = threading.Thread(target=lambda: (x + 1).tolist())
        thread.start()
        thread.join()
    assert len(recorders._recorders) <= before + 1


@pytest.fixture
def broken(monkeypatch):
    """Programs with a sine fail."""
    original = compile_cache.making

    def get(key, *args):
        if any(getattr(entry, "name", "") == "aten::sin" for entry in key.structure):
            raise spmd.errors.ProgramError("the device failed")
        return original(key, *args)

    monkeypatch.setattr(compile_cache, "cached", lambda key: None)
    monkeypatch.setattr(compile_cache, "making", get)


def test_a_failure_stays_in_its_thread(worker, broken):
    ours, theirs = torch.ones(3).to("xla"), torch.ones(2).to("xla")
    shared = torch.ones(4).to("xla")
    worker(lambda: theirs.add_(theirs.sin()))
    read = worker(doubled, shared)
    ours.mul_(3)
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        worker(spmd.sync)
    assert is_pending(ours) and not is_pending(read)
    spmd.sync()
    assert not is_pending(ours)
    assert spmd.roll_back() == 0 and worker(spmd.roll_back) == 1
    assert theirs.tolist() == [1.0] * 2 and ours.tolist() == [3.0] * 3


def test_a_failure_leaves_pending_what_it_needs_of_another_thread(worker, broken):
    x = torch.ones(3).to("xla")
    theirs = worker(doubled, x)
    ours = theirs.sin()
    with pytest.raises(spmd.errors.ProgramError, match="the device failed"):
        ours.cpu()
    assert is_pending(theirs)
    worker(spmd.sync)
    assert not is_pending(theirs) and theirs.tolist() == [2.0] * 3


def test_a_backward_is_recorded_by_the_thread_that_calls_it(worker):
    x = torch.arange(3.0).to("xla").requires_grad_()

    def step():
        (x.square() * 3).sum().backward()
        return x.grad._handle.recorder is recorders.current()

    assert worker(step) and is_pending(x.grad)
    spmd.sync()
    assert is_pending(x.grad)
    worker(spmd.sync)
    assert not is_pending(x.grad) and x.grad.tolist() == [0.0, 6.0, 12.0]


def test_a_backward_in_a_thread_that_records_nothing_else(worker):
    """Autograd's own thread records it, for whichever thread cuts next."""
    x = torch.arange(3.0).to("xla").requires_grad_()
    y, gradient = x.square(), torch.ones(3).to("xla") + 0
    worker(y.backward, gradient)
    spmd.sync()
    assert not is_pending(x.grad) and x.grad.tolist() == [0.0, 2.0, 4.0]


def test_autograd_with_threads_of_its_own(worker):
    x = torch.arange(3.0).to("xla").requires_grad_()

    def step():
        y = x.square().sum()
        with torch.autograd.set_multithreading_enabled(True):
            y.backward()
        spmd.sync()
        return is_pending(x.grad), x.grad.tolist()

    assert worker(step) == (False, [0.0, 2.0, 4.0])


def test_a_region_is_about_the_cuts_of_its_thread(worker):
    x = torch.ones(3).to("xla")
    with spmd.compile(full_graph=True, name="ours"):
        ours = x + 1
        assert worker(lambda: doubled(x).tolist()) == [2.0] * 3
        assert not compile_cache.newest().record.name.startswith("ours")
    assert ours.tolist() == [2.0] * 3


def test_closures_run_at_the_end_of_their_threads_step(worker):
    seen = []
    worker(spmd.add_step_closure, seen.append, ("theirs",))
    spmd.add_step_closure(seen.append, ("ours",))
    spmd.sync()
    assert seen == ["ours"]
    worker(spmd.sync)
    assert seen == ["ours", "theirs"]
    thread = threading.Thread(target=spmd.add_step_closure, args=(seen.append, ("left",)))
    thread.start()
    thread.join()
    spmd.sync()
    assert seen[2:] == ["left"]


def test_recomputations_of_several_threads(worker):
    """Each backward runs its own forward again, while the other one is in the middle of its own."""
    meet = threading.Barrier(2, timeout=60)
    is_backward = threading.local()

    def block(x):
        if getattr(is_backward, "on", False):
            meet.wait()
        y = (x * 3).sin()
        if getattr(is_backward, "on", False):
            meet.wait()
        return y

    def step(start):
        x = torch.full((3,), start).to("xla").requires_grad_()
        y = checkpoint(block, x, use_reentrant=False).sum()
        is_backward.on = True
        y.backward()
        meet.wait()
        return x.grad.cpu()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(step, (1.0, 2.0)))
    assert values.recomputation is None
    for gradient, start in zip(found, (1.0, 2.0)):
        torch.testing.assert_close(gradient, 3 * torch.full((3,), 3 * start).cos())


def test_loops_of_several_threads_that_never_cut(monkeypatch, worker):
    """Each is cut at its own steps, as a loop of one thread is."""
    for name in ("MIN_OPERATIONS", "MIN_STATELESS", "MAX_OPERATIONS"):
        monkeypatch.setattr(automatic_cut, name, getattr(automatic_cut, name) // 8)
    monkeypatch.setattr(storage, "PENDING_BLOCK", storage.PENDING_BLOCK // 8)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def loop(number):
        x = torch.zeros(3).to("xla")
        spmd.sync()
        for _ in range(60):
            assert turns[number].acquire(timeout=60)
            x.mul_(0.5)
            for _ in range(16 + number):
                x.add_(x + 1)
            turns[1 - number].release()
        return x

    def expected(number):
        x = torch.zeros(3)
        for _ in range(60):
            x.mul_(0.5)
            for _ in range(16 + number):
                x.add_(x + 1)
        return x

    compiles, automatic = counter("compiles"), counter("automatic_cuts")
    with (
        pytest.warns(UserWarning, match=r"a step ends with spmd\.sync"),
        ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(loop, (0, 1)))
    assert counter("automatic_cuts") - automatic > 50
    assert counter("compiles") - compiles <= 8
    for x, number in zip(found, (0, 1)):
        torch.testing.assert_close(x.cpu(), expected(number))
    automatic_cut.reset()
    assert automatic_cut._installed() is router.route


def test_new_tensors_of_several_threads_have_addresses_of_their_own():
    def addresses(_):
        return [torch.ones(3).to("xla").data_ptr() for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        found = [a for some in pool.map(addresses, range(4)) for a in some]
    assert len({*found}) == len(found)
