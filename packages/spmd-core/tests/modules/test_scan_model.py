"""`scan_model`: a model's own code, whose layers run as one loop, against eager torch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, WrapError


class Block(nn.Module):
    def __init__(self, width=8, p=0.0):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x, scale=None, factor=1.0):
        y = torch.tanh(self.linear(self.norm(x))) * factor
        return x + self.dropout(y if scale is None else y * scale)


class Model(nn.Module):
    """Blocks between two layers; `how` is what the model's code does with the blocks."""

    def __init__(self, how, num_layers=4, width=8, p=0.0):
        super().__init__()
        self.how = how
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width, p) for _ in range(num_layers))
        self.last = nn.Linear(width, 3)

    def forward(self, x, **kwargs):
        return self.last(self.how(self, self.first(x), **kwargs))


def in_turn(model, x, **kwargs):
    for block in model.blocks:
        x = block(x, **kwargs)
    return x


def models(how=in_turn, **sizes):
    torch.manual_seed(0)
    eager = Model(how, **sizes)
    model = copy.deepcopy(eager).to("xla")
    assert spmd.scan_model(model) is model
    return eager, model


def compare(eager, model, x, **kwargs):
    """Values and all gradients against eager torch."""
    on_device = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    expected, found = eager(x, **kwargs), model(x.to("xla"), **on_device)
    expected.square().mean().backward()
    found.square().mean().backward()
    torch.testing.assert_close(found.detach().cpu(), expected.detach())
    for (name, own), other in zip(model.named_parameters(), eager.parameters()):
        assert (own.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(
                own.grad.cpu(), other.grad, msg=lambda m, n=name: f"{n}: {m}"
            )
    eager.zero_grad()
    model.zero_grad()


def counted(function):
    before = spmd.metrics.counter("layers_called_apart")
    function()
    return spmd.metrics.counter("layers_called_apart") - before


def is_a_loop(model, x, **kwargs):
    text = spmd.debugging.passes(model(x.to("xla"), **kwargs).sum())
    return "spmd::scan" in text


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 6)


@pytest.mark.one_device
def test_layers_called_in_turn_are_one_loop(x):
    eager, model = models()
    assert counted(lambda: compare(eager, model, x)) == 0
    assert is_a_loop(model, x)
    scale = torch.rand(5, 8)
    assert counted(lambda: compare(eager, model, x, scale=scale, factor=0.5)) == 0
    assert [*model.state_dict()] == [*eager.state_dict()]
    assert type(model.blocks[0]).__name__ == "Block" and isinstance(model.blocks[0], Block)
    with torch.no_grad():
        torch.testing.assert_close(model(x.to("xla")).cpu(), eager(x))
    spmd.scan_model(model)  # again
    assert counted(lambda: compare(eager, model, x)) == 0


def test_sequences_dicts_and_slices(x):
    eager = nn.Sequential(nn.Linear(6, 8), *(Block() for _ in range(3)), nn.Linear(8, 2))
    model = spmd.scan_model(copy.deepcopy(eager).to("xla"))
    assert counted(lambda: compare(eager, model, x)) == 0
    assert is_a_loop(model, x)

    def of_a_slice(model, x):
        for i, block in enumerate(model.blocks[:4]):
            x = block(x) if i % 2 else block.__call__(x)
        return x

    eager, model = models(of_a_slice)
    assert counted(lambda: compare(eager, model, x)) == 0


def early_exit(model, x):
    for block in model.blocks[:2]:
        x = block(x)
    return x


def parallel(model, x):
    return sum(block(x) for block in model.blocks)


def reversed_order(model, x):
    for block in reversed(model.blocks):
        x = block(x)
    return x


def between(model, x):
    for block in model.blocks:
        x = block(x) + 1
    return x


def skips(model, x):
    kept = []
    for block in model.blocks:
        kept.append(x)
        x = block(x)
    return x + kept[0]


def looks(model, x):
    for block in model.blocks:
        x = block(x)
        if x.dim() != 2 or x.dtype != torch.float32:
            raise AssertionError
        x.mean()  # a read of a layer's result
    return x


def twice(model, x):
    return in_turn(model, in_turn(model, x))


def factors(model, x):
    for i, block in enumerate(model.blocks):
        x = block(x, factor=1.0 - 0.1 * i)
    return x


def marked_between(model, x):
    for block in model.blocks:
        x = block(x)
        if x.device.type == "xla":
            count = spmd.global_runtime_device_count()
            x = spmd.constrain(x, spmd.Mesh(range(count), (count,), ("x",)), (None, None))
    return x


def one_alone(model, x):
    return model.blocks[0](x)


def repeated(model, x):
    for block in (model.blocks[0], model.blocks[0], *model.blocks):
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("how", "apart"),
    [
        (early_exit, True),
        (parallel, True),
        (reversed_order, True),
        (between, True),
        (skips, False),
        (looks, True),
        (twice, False),
        (factors, True),
        (marked_between, True),
        (one_alone, False),
        (repeated, False),
    ],
)
def test_whatever_a_model_does_is_computed(x, how, apart):
    eager, model = models(how)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        called = counted(lambda: compare(eager, model, x))
        again = counted(lambda: compare(eager, model, x))
    assert (called > 0) is apart and called == again
    said = [str(w.message) for w in seen if "scan_model" in str(w.message)]
    assert bool(said) is apart and len({*said}) == len(said)
    assert all("the 4 layers of blocks are called one after another" in text for text in said)


def test_a_result_that_is_kept_beyond_the_loop_is_an_error(x):
    def collects(model, x):
        kept = []
        for block in model.blocks:
            x = block(x)
            kept.append(x)
        return x + kept[1]

    _, model = models(collects)
    with pytest.raises(ControlFlowError, match="got a use of that of layer 1 of 4 after the last"):
        model(x.to("xla"))


def test_layers_that_differ_in_what_they_read_are_called_apart(x):
    eager, model = models()
    for block in model.blocks:
        block.number = id(block)  # which no forward reads
    assert counted(lambda: compare(eager, model, x)) == 0
    for of in (eager, model):
        of.blocks[1].norm.eps = 1e-2
    with pytest.warns(UserWarning, match=r"scan_model: the 4 layers .* got a read of norm.eps"):
        compare(eager, model, x)


def test_hooks_run_in_the_loop_and_a_hook_of_one_layer_apart(x):
    eager, model = models()
    for of in (eager, model):
        for block in of.blocks:
            block.register_forward_hook(_doubled)
    assert counted(lambda: compare(eager, model, x)) == 0
    for of in (eager, model):
        of.blocks[1].register_forward_hook(_doubled)
    with pytest.warns(UserWarning, match="one after another"):
        compare(eager, model, x)


def test_a_hook_that_keeps_results_is_an_error(x):
    _, model = models()
    kept = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: kept.append(output))
    with pytest.raises(ControlFlowError, match="the 4 layers of blocks have a hook that does"):
        model(x.to("xla"))


def _doubled(module, args, output):
    return output * 0.5


def test_other_layers_are_named(x):
    with pytest.raises(WrapError, match="scan_model looks for layers of one class"):
        spmd.scan_model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
    with pytest.raises(TypeError, match="model"):
        spmd.scan_model([nn.Linear(2, 2)])


def test_on_another_device_a_model_runs_as_before(x):
    eager, _ = models()
    other = spmd.scan_model(copy.deepcopy(eager))
    assert torch.equal(other(x), eager(x))
    copied = copy.deepcopy(other).to("xla")
    assert is_a_loop(copied, x)
    torch.testing.assert_close(copied(x.to("xla")).detach().cpu(), eager(x).detach())


@pytest.mark.parametrize("where", ["model", "layers", "spmd"])
def test_recomputation(x, where):
    eager, model = models()
    if where == "spmd":
        for block in model.blocks:
            spmd.checkpoint_module(block)
        assert counted(lambda: compare(eager, model, x)) == 0
        return
    if where == "model":
        plain = model.how
        model.how = lambda m, x: checkpoint(plain, m, x, use_reentrant=False)
        assert counted(lambda: compare(eager, model, x)) == 0
        return
    model.how = _each_checkpointed
    with pytest.warns(UserWarning, match="one after another"):
        compare(eager, model, x)


def _each_checkpointed(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def test_dropout_draws_another_mask_in_each_layer():
    _, model = models(p=0.5, num_layers=3, width=64)
    for block in model.blocks:
        nn.init.zeros_(block.linear.weight)
        nn.init.ones_(block.linear.bias)
    torch.manual_seed(0)
    first = model.first(torch.zeros(4, 6).to("xla"))
    kept = (in_turn(model, first) - first).detach().cpu() / (2 * torch.tanh(torch.tensor(1.0)))
    counts = kept.round().flatten().long().bincount(minlength=4) / kept.numel()
    expected = torch.tensor([1, 3, 3, 1]) / 8
    assert (counts - expected).abs().max() < 0.1


@pytest.mark.parametrize("marks", [("a", None), (None, "b"), ("b", "a")])
def test_marks_fsdp_and_training(x, marks, num_devices):
    if num_devices != 8:
        pytest.skip("a mesh of 8 devices")
    mesh = spmd.Mesh(range(8), (4, 2), ("a", "b"))
    eager, model = models(width=10)
    for block in model.blocks:
        spmd.mark_sharding(block.linear.weight, mesh, marks)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (eager, model)]
    before = spmd.metrics.counter("compiles")
    for seed in range(3):
        torch.manual_seed(seed)
        batch = torch.randn(6, 6)
        for m, optimizer, data in zip((eager, model), optimizers, (batch, batch.to("xla"))):
            m(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        spmd.sync()
    assert spmd.metrics.counter("compiles") - before <= 1
    for own, other in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(own.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-5)
