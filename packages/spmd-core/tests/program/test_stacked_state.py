"""Stacks among a program's inputs and results: what lies in one array, and when."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from tiers import crossed

import spmd_core as spmd
from spmd_core.graph.recorders import lock
from spmd_core.graph.stacks import Row, stack_entry, stacked_sharding, unstack_entry
from spmd_core.graph.storage import Storage, read
from spmd_core.graph.values import OpResult, Value
from spmd_core.program import start
from spmd_core.tensor.sharded_tensor import wrap


class _Stacked(torch.autograd.Function):
    """The tensors of layers as one, whose gradient is that of each."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.spec, ctx.count = tensors[0]._handle.spec, len(tensors)
        sharding = tensors[0]._handle.sharding
        with lock:
            entry = stack_entry(ctx.spec, ctx.count)
            storage = Storage(Value(entry, [read(t._handle) for t in tensors], ()), entry.spec)
            storage.sharding = None if sharding is None else stacked_sharding(sharding)
            return wrap(storage)

    @staticmethod
    def backward(ctx, grad):
        with lock:
            entry = unstack_entry(ctx.spec, ctx.count)
            node = Value(entry, (read(grad._handle),), ())
            rows = [OpResult(node, i) for i in range(ctx.count)]
            return tuple(wrap(Storage(row, ctx.spec.logical)) for row in rows)


class _Model(torch.nn.Module):
    def __init__(self, width=6, num_layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_layers))
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x):
        if x.device.type == "cpu":
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x)
        weights = _Stacked.apply(*(layer.weight for layer in self.layers))
        biases = _Stacked.apply(*(layer.bias for layer in self.layers))

        def one(x, of_layer):
            return torch.tanh(torch.nn.functional.linear(x, *of_layer)), None

        return self.head(spmd.control_flow.scan(one, x, (weights, biases))[0])


def _lies(tensor):
    return tensor._handle.value.data


def _are_rows(tensors):
    """Whether the data of tensors are the rows of one array, in order."""
    rows = [*map(_lies, tensors)]
    return all(r.__class__ is Row and r.stack is rows[0].stack for r in rows) and [
        r.index for r in rows
    ] == [*range(len(rows))]


def _models(width=6, marks=None):
    torch.manual_seed(0)
    eager, model = _Model(width), _Model(width)
    model.load_state_dict(eager.state_dict())
    model.to("xla")
    if marks is not None:
        mesh = spmd.Mesh(range(8), (4, 2), ("a", "b"))
        for layer in model.layers:
            spmd.mark_sharding(layer.weight, mesh, marks)
    return eager, model


def _step(model, optimizer, seed, clip=True):
    torch.manual_seed(seed)
    x = torch.randn(5, model.head.in_features).to(model.head.weight.device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if x.device.type == "xla":
        spmd.sync()
    return loss.item()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
MARKS = [None, ("a", None), ("a", "b"), (None, ("a", "b"))]


@pytest.mark.one_device
@pytest.mark.parametrize(("name", "marks", "width"), crossed([*OPTIMIZERS], MARKS, [6, 8]), ids=str)
def test_training_has_one_program_whose_state_lies_stacked(name, marks, width, num_devices):
    if marks is not None and num_devices != 8:
        pytest.skip("the marks are for a mesh of 4 x 2")
    eager, model = _models(width, marks)
    optimizers = OPTIMIZERS[name](eager.parameters()), OPTIMIZERS[name](model.parameters())
    before = spmd.metrics.counter("compiles")
    for seed in range(3):
        losses = [_step(m, o, seed) for m, o in zip((eager, model), optimizers)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert spmd.metrics.counter("compiles") - before <= 1
    for own, other in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(own.cpu(), other.detach(), rtol=1e-5, atol=1e-6)
    for part in ("weight", "bias"):
        own = [getattr(layer, part) for layer in model.layers]
        assert _are_rows(own)
        states = [optimizers[1].state[p] for p in own]
        for key, value in states[0].items():
            if value is not None and value.device.type == "xla":
                assert _are_rows([state[key] for state in states]), key


def test_a_step_copies_no_stack():
    _, model = _models(8, (("a", "b"), None))
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed)
    record = spmd.metrics.programs()[-1]
    stacks = 3 * 8 * 8 * 4 // 8
    assert record.alias_bytes >= 4 * stacks  # the parameters and three moments, in place


def test_rows_are_read_and_written_one_by_one():
    eager, model = _models(6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for seed in range(4):
        losses = [_step(m, o, seed) for m, o in zip((eager, model), optimizers)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        with torch.no_grad():
            for m in (eager, model):
                if seed == 1:
                    m.layers[1].weight.mul_(0.5)  # one row leaves the stack
                if seed == 2:
                    m.layers[0].bias.copy_(torch.ones(6))
        row = model.layers[1].weight
        torch.testing.assert_close(row.cpu(), eager.layers[1].weight.detach())
        assert row.sum().item() == pytest.approx(eager.layers[1].weight.sum().item(), rel=1e-5)
    assert _are_rows([layer.weight for layer in model.layers])


def test_a_row_that_is_kept_is_not_overwritten():
    _, model = _models(6)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _step(model, optimizer, 0)
    weight = model.layers[2].weight
    before = weight.detach().cpu()
    alias = torch.empty(0, device="xla").set_(weight.detach().clone())
    pending = weight.detach() * 1.0  # reads the row before the next step
    _step(model, optimizer, 1)
    torch.testing.assert_close(pending.cpu(), before, rtol=0, atol=0)
    torch.testing.assert_close(alias.cpu(), before, rtol=0, atol=0)
    assert not torch.equal(weight.cpu(), before)


def test_loading_into_rows_and_another_mark():
    eager, model = _models(6)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _step(model, optimizer, 0)
    model.load_state_dict({k: v + 1 for k, v in eager.state_dict().items()})
    count = spmd.global_runtime_device_count()
    mesh = spmd.Mesh(range(count), (count,), ("a",))
    for layer in model.layers:
        spmd.mark_sharding(layer.weight, mesh, ("a", None))
    x = torch.randn(5, 6)
    with torch.no_grad():
        for p in eager.parameters():
            p.add_(1)
        torch.testing.assert_close(model(x.to("xla")).cpu(), eager(x))
    for layer, own in zip(model.layers, eager.layers):
        shards = layer.weight.local_shards
        assert len(shards) == count
        assert torch.equal(shards[0].data[:1], own.weight[:1].detach())
    assert _are_rows([layer.weight for layer in model.layers])
    saved = {k: v.cpu() for k, v in model.state_dict().items()}
    assert all(torch.equal(saved[k], v) for k, v in eager.state_dict().items())


def test_rows_of_two_groupings_are_right():
    eager, model = _models(6)
    x = torch.randn(4, 6)
    weights = [layer.weight for layer in model.layers]
    plain = [layer.weight.detach() for layer in eager.layers]
    for order in ((0, 1, 2), (2, 0, 1), (0, 1), (1, 1, 2)):
        made = _Stacked.apply(*(weights[i] for i in order))
        assert torch.equal(made.detach().cpu(), torch.stack([plain[i] for i in order]))
    torch.testing.assert_close(model(x.to("xla")).detach().cpu(), eager(x).detach())


def test_a_failed_start_loses_nothing(monkeypatch):
    _, model = _models(6)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    _step(model, optimizer, 0)
    values = [p.detach().cpu() for p in model.parameters()]
    monkeypatch.setattr(start, "start", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(2)
        with pytest.raises(KeyboardInterrupt):
            spmd.sync()
        monkeypatch.undo()
    weights = [layer.weight.detach().cpu() for layer in model.layers]
    for now, before in zip(weights, values[0::2]):
        torch.testing.assert_close(now, before * 2)


def test_a_scan_keeps_nothing_once_it_is_over():
    weights = torch.randn(3, 6, 6, device="xla", requires_grad=True)
    gc.disable()
    try:
        stack = weights * 1.0
        kept = weakref.ref(stack._handle)
        h, _ = spmd.control_flow.scan(lambda h, w: (h @ w, None), torch.ones(2, 6).to("xla"), stack)
        h.sum().backward()
        del stack, h
        assert kept() is None
    finally:
        gc.enable()


def test_the_state_of_a_loaded_optimizer_is_stacked():
    eager, model = _models(6)
    make = OPTIMIZERS["fused"]
    first = [make(m.parameters()) for m in (eager, model)]
    for seed in range(2):
        for m, optimizer in zip((eager, model), first):
            _step(m, optimizer, seed)
    second = [make(m.parameters()) for m in (eager, model)]
    for before, after in zip(first, second):
        after.load_state_dict(before.state_dict())
    for seed in range(2, 4):
        losses = [_step(m, o, seed) for m, o in zip((eager, model), second)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    states = [second[1].state[layer.weight] for layer in model.layers]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert _are_rows([state[key] for state in states])


def test_gradients_that_live_on_lie_stacked():
    eager, model = _models(6)
    for seed in range(3):
        for m in (eager, model):
            torch.manual_seed(seed)
            m(torch.randn(4, 6).to(m.head.weight.device)).square().sum().backward()
        spmd.sync()
        assert _are_rows([layer.weight.grad for layer in model.layers])
        for own, other in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(own.grad.cpu(), other.grad)
    model.layers[1].weight.grad = None  # one that leaves
    model.layers[0].weight.grad.zero_()
    model(torch.ones(4, 6, device="xla")).sum().backward()
    assert model.layers[1].weight.grad.isfinite().all()


def test_a_fused_step_leaves_gradients_of_a_loop_stacked():
    _, model = _models()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed, clip=False)
        assert _are_rows([layer.weight.grad for layer in model.layers])


CHANGES = {  # of the layers' gradients, and whether they lie stacked afterwards
    "clipped": (lambda grads: torch.nn.utils.clip_grad_norm_(_having(grads), 0.5), True),
    "clipped one by one": (
        lambda grads: torch.nn.utils.clip_grad_norm_(_having(grads), 0.5, foreach=False),
        True,
    ),
    "clipped by value": (lambda grads: torch.nn.utils.clip_grad_value_(_having(grads), 0.01), True),
    "scaled": (lambda grads: torch._foreach_mul_(grads, 2.0), True),
    "another factor": (lambda grads: [g.mul_(i + 1) for i, g in enumerate(grads)], True),
    "two": (lambda grads: [g.mul_(2) for g in grads[:2]], False),
    "other operations": (lambda grads: [grads[0].mul_(2), grads[1].exp_(), grads[2].neg_()], False),
    "in turn": (lambda grads: [a.add_(b) for a, b in itertools.pairwise(grads)], False),
    "new ones": (lambda grads: [g.copy_(torch.ones_like(g)) for g in grads], False),
}


def _having(grads):
    """Parameters with these gradients."""
    parameters = [torch.nn.Parameter(torch.empty_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad
    return parameters


@pytest.mark.parametrize("marks", [None, ("a", None)], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_that_are_changed_lie_stacked(name, marks):
    if marks is not None and spmd.global_runtime_device_count() < 8:
        pytest.skip("the marks are for a mesh of 4 x 2")
    change, are_rows = CHANGES[name]
    eager, model = _models(8, marks)
    for seed in range(3):
        for m in (eager, model):
            torch.manual_seed(seed)
            m.zero_grad()
            m(torch.randn(4, 8).to(m.head.weight.device)).square().sum().backward()
            change([layer.weight.grad for layer in m.layers])
        spmd.sync()
        assert _are_rows([layer.weight.grad for layer in model.layers]) is are_rows
        for own, other in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
            with torch.no_grad():  # what reads rows afterwards gets theirs
                own.sub_(own.grad, alpha=0.01)
                other.sub_(other.grad, alpha=0.01)


@pytest.mark.parametrize("name", ["adamw", "fused", "sgd"])
def test_clipped_gradients_that_an_optimizer_reads_lie_stacked(name):
    """Else each layer's would be sliced out of the stack by a kernel of its own."""
    _, model = _models()
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed)
        assert _are_rows([layer.weight.grad for layer in model.layers])


def test_gradients_that_a_fused_step_unscales_lie_stacked():
    eager, model = _models()
    for seed in range(2):
        for m in (eager, model):
            device = m.head.weight.device.type
            optimizer = OPTIMIZERS["fused"](m.parameters())
            scaler = torch.amp.GradScaler(device, init_scale=64.0)
            torch.manual_seed(seed)
            m.zero_grad()
            scaler.scale(m(torch.randn(5, 6).to(device)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        spmd.sync()
        assert _are_rows([layer.weight.grad for layer in model.layers])
        for own, other in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-6)


def test_a_captured_step_threads_stacks_through():
    losses = {}
    for capture in (False, True):
        _, model = _models(6)
        optimizer = OPTIMIZERS["fused"](model.parameters())

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = spmd.compile(step, capture=capture)
        found = losses[capture] = []
        for seed in range(7):
            torch.manual_seed(seed)
            if seed == 4:  # one row leaves its stack between two calls
                with torch.no_grad():
                    model.layers[1].weight.mul_(0.5)
            found.append(compiled(torch.randn(5, 6, device="xla")).item())
        if capture:
            assert compiled.replayed >= 3
        assert _are_rows([layer.weight for layer in model.layers])
    assert losses[True] == losses[False]


def test_copies_of_a_model_and_averages_lie_stacked_of_their_own():
    eager, model = _models(6)
    copied = copy.deepcopy(model)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    averages = [
        torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=average) for m in (eager, model)
    ]
    optimizers = [OPTIMIZERS["foreach"](m.parameters()) for m in (eager, model)]
    for seed in range(3):
        for m, optimizer, averaged in zip((eager, model), optimizers, averages):
            _step(m, optimizer, seed)
            averaged.update_parameters(m)
        spmd.sync()
    assert _are_rows([layer.weight for layer in averages[1].module.layers])
    for own, other in zip(averages[1].parameters(), averages[0].parameters()):
        torch.testing.assert_close(own.cpu(), other.detach())
    first = _models(6)[0]
    for own, other in zip(copied.parameters(), first.parameters()):
        assert torch.equal(own.detach().cpu(), other.detach())


def test_a_new_stack_of_parameters_that_stay_is_not_donated():
    eager, model = _models(6)
    for seed in range(2):  # the gradients have the layout of the parameters, which nothing updates
        model.zero_grad()
        model(torch.full((4, 6), seed + 1.0, device="xla")).square().sum().backward()
        spmd.sync()
        for own, other in zip(model.parameters(), eager.parameters()):
            assert torch.equal(own.detach().cpu(), other.detach())
