"""Tests spmd_core.modules.scan_layers: what a loop over layers computes, against eager torch."""

import copy

import pytest
import torch
from layer_models import HIDDEN, WIDTH, Attention, Block, compare, given, one_by_one
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, DeviceMismatchError, WrapError

X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def through(x, *args, **kwargs):
    """For `compare`: the result, and the gradient of `x`."""

    def compute(run, layers, device):
        leaf = given(x, device)
        result = run(layers, leaf, *args, **kwargs)
        (grad,) = torch.autograd.grad(result.sin().sum(), leaf, retain_graph=True)
        return [result, grad]

    return compute


def test_values_and_gradients_and_one_layer_in_the_program():
    layers = compare(Block, through(X))
    assert [layer.index for layer in layers] == [0, 1, 2] and type(layers[0]) is Block
    texts = [
        spmd.debugging.operations(spmd.scan_layers(some, X.to("xla")))
        for some in (layers, [*layers] * 2)
    ]
    counts = [text.count("aten::gelu") for text in texts]
    assert counts == [1, 1]


class Gated(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(functional.silu(self.gate(x)) * functional.gelu(self.up(x)))


def test_activations_and_gates_are_computed_again_and_not_kept():
    compare(Gated, through(X), count=4)
    layers = [Gated(0).to("xla") for _ in range(4)]
    text = spmd.debugging.operations(spmd.scan_layers(layers, X.to("xla").requires_grad_()))
    (line,) = [line for line in text.splitlines() if "spmd::scan(" in line]
    results = line.partition("->")[2]
    assert results.count(f"float32[4, 4, {HIDDEN}]") == 2  # before both activations


@pytest.mark.parametrize("count", [1, 2])
def test_few_layers(count):
    compare(Block, through(X), count=count)


def test_no_layer():
    x = X.to("xla")
    assert spmd.scan_layers([], x) is x
    assert spmd.scan_layers(nn.Sequential(), (x, None)) == (x, None)


class Several(nn.Module):
    """Carries a dict; takes arguments of all kinds; returns others behind it."""

    def __init__(self, _):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state, bias, *, own, index, cache, scale, nothing):
        assert nothing is None
        y = torch.tanh(self.linear(state["x"]) + bias) * scale + own
        keys = cache["k"] * 2 + y.sum() * index
        new = {"x": y, "count": state["count"] + index}
        return new, (keys, None), y.mean(-1), bias


def test_arguments_and_results_of_all_kinds():
    def compute(run, layers, device):
        shapes = [(4, WIDTH), (3, 4, 1), (WIDTH,), (), (2, 5), (2, 5), (2, 5)]
        torch.manual_seed(1)
        leaves = [given(torch.randn(shape), device) for shape in shapes]
        x, own, bias, scale, *keys = leaves
        state, (new, nothing), means, biases = run(
            layers,
            {"x": x, "count": torch.zeros((), dtype=torch.int64, device=device)},
            bias,
            scale=scale,
            nothing=None,
            per_layer={"own": own, "index": [0, 1, 2], "cache": {"k": keys}},
        )
        assert nothing is None and new.shape == (3, 2, 5) and biases.shape == (3, WIDTH)
        total = state["x"].sum() + new.square().sum() + means.sin().sum() + biases.sum()
        grads = torch.autograd.grad(total, leaves, retain_graph=True)
        return [state["x"], state["count"], new, means, biases, *grads]

    compare(Several, compute)


class Cached(nn.Module):
    """Attention over what a cache has, and over what the layer writes into it."""

    def __init__(self, _):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, cache, position):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keys, values = (
            old.index_copy(2, position, new) for old, new in zip(cache, (k, v), strict=True)
        )
        mask = torch.arange(keys.shape[2], device=x.device) <= position[:, None]
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return x + y.transpose(1, 2).flatten(2), (keys, values)


def test_key_value_caches_while_decoding():
    """Without gradients, step by step, with the stacked caches of the step before."""

    def compute(run, layers, device):
        torch.manual_seed(1)
        caches = tuple(torch.zeros(3, 2, 2, 5, 4, device=device) for _ in range(2))
        results = []
        with torch.inference_mode():
            for step in range(3):
                x = torch.randn(2, 1, 8).to(device)
                position = torch.tensor([step]).to(device)
                x, caches = run(layers, x, position, per_layer=caches)
                results.append(x)
        return [*results, *caches]

    compare(Cached, compute)


def test_attention_with_a_mask_that_all_layers_share():
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -10.0)

    def compute(run, layers, device):
        x, bias = given(torch.linspace(-1, 1, 80).view(2, 5, 8), device), given(mask, device)
        result = run(layers, x, mask=bias)
        return [result, *torch.autograd.grad(result.sin().sum(), (x, bias), retain_graph=True)]

    compare(Attention, compute, count=2)


def test_shared_tensors_repeated_layers_and_frozen_ones():
    """One tensor of all layers is one; a layer that comes twice has the sum of its gradients."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH)

    def make(i):
        block = Block(i)
        block.norm = norm
        block.up.weight.requires_grad_(i == 1)
        block.down.requires_grad_(False)
        return block

    def compute(run, layers, device):
        return through(X)(run, [layers[i] for i in (0, 1, 0, 2)], device)

    layers = compare(make, compute)
    assert layers[0].norm is layers[2].norm and layers[0].up.weight.grad is None


def test_no_gradients_no_parameters_and_inference():
    def compute(run, layers, device):
        x = given(X, device)
        with torch.no_grad():
            a = run(layers, x)
        with torch.inference_mode():
            b = run(layers, x)
        c = run(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()), x)
        (grad,) = torch.autograd.grad(c.sum(), x)
        assert not a.requires_grad and b.is_inference()
        return [a, b.clone(), c.detach(), grad]

    compare(Block, compute)


def test_gradients_of_gradients():
    class Smooth(nn.Module):
        def __init__(self, _):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x).sin() * x

    def compute(run, layers, device):
        x = given(X, device)
        inputs = [x, *layers.parameters()]
        first = torch.autograd.grad(
            run(layers, x).square().sum(), inputs, create_graph=True, materialize_grads=True
        )
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), inputs, materialize_grads=True
        )
        return [*(g.detach() for g in first), *second]

    compare(Smooth, compute, rtol=1e-3, atol=1e-3)


class Again(Block):
    def forward(self, x, use_reentrant=False):
        return checkpoint(super().forward, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("how", ["torch", "module", "around"])
def test_recomputation(how):

    def compute(run, layers, device):
        if how != "around":
            return through(X)(run, layers, device)
        x = given(X, device)
        result = checkpoint(lambda x: run(layers, x), x, use_reentrant=False)
        return [result, *torch.autograd.grad(result.sin().sum(), x, retain_graph=True)]

    def prepare(layers):
        if how == "module":
            for layer in layers:
                spmd.checkpoint_module(layer)

    compare(Again if how == "torch" else Block, compute, prepare=prepare)


def test_checkpointed_layers_keep_what_enters_them_and_nothing_else():
    layers = nn.ModuleList(Block() for _ in range(4)).to("xla")
    x = X.to("xla").requires_grad_()
    spmd.scan_layers(layers, x).sum().backward()
    stacks = [spmd.debugging.operations(x.grad, *(p.grad for p in layers.parameters()))]
    layers.zero_grad(), setattr(x, "grad", None)
    for layer in layers:
        spmd.checkpoint_module(layer)
    spmd.scan_layers(layers, x).sum().backward()
    stacks.append(spmd.debugging.operations(x.grad, *(p.grad for p in layers.parameters())))
    assert f"float32[4, 4, {HIDDEN}]" in stacks[0] and f"float32[4, 4, {HIDDEN}]" not in stacks[1]


def test_autocast():
    def compute(run, layers, device):
        with torch.autocast(device, dtype=torch.bfloat16):
            return through(X)(run, layers, device)

    compare(Block, compute, rtol=5e-2, atol=5e-2)


def test_dropout_has_another_mask_in_each_layer_and_the_same_in_recomputation():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            y = self.drop(x)
            return x, y

    x = torch.ones(2000, device="xla")
    _, kept = spmd.scan_layers([Kept() for _ in range(4)], x)
    counts = (kept > 0).sum(0)
    assert set(counts.tolist()) == {0, 1, 2, 3, 4}
    assert 3800 < counts.sum().item() < 4200 and kept.max().item() == 2
    _, again = spmd.scan_layers([Kept() for _ in range(4)], x)
    assert not torch.equal(again.cpu(), kept.cpu())

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.weight = nn.Dropout(0.5), nn.Parameter(torch.ones(2000))

        def forward(self, x):
            return x, checkpoint(lambda w: self.drop(w), self.weight, use_reentrant=False)

    layers = nn.ModuleList(Dropped() for _ in range(3)).to("xla")
    _, dropped = spmd.scan_layers(layers, x)
    dropped.sum().backward()
    for layer, forward in zip(layers, dropped, strict=True):
        assert torch.equal(layer.weight.grad.cpu(), forward.detach().cpu())


def test_functional_call_and_regions():
    """Other parameters in place of the layers' own; and a program of its own for each call."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block(i) for i in range(3))

        def forward(self, x, run):
            return run(self.layers, x)

    torch.manual_seed(0)
    right = Model()
    mine = copy.deepcopy(right).to("xla")
    results = []
    for model, run, device in ((right, one_by_one, "cpu"), (mine, spmd.scan_layers, "xla")):
        given_ones = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        result = torch.func.functional_call(model, given_ones, (X.to(device), run))
        grads = torch.autograd.grad(result.sum(), [*given_ones.values()])
        results.append([result.detach().cpu(), *(g.cpu() for g in grads)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (right, mine)]

    def step(model, optimizer, x, run):
        optimizer.zero_grad()
        loss = model(x, run).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = [spmd.compile(step), spmd.compile(step, capture=True, name="captured")]
    for each in compiled:
        for _ in range(4):
            x = torch.randn(4, WIDTH)
            expected = step(right, optimizers[0], x, one_by_one)
            actual = each(mine, optimizers[1], x.to("xla"), spmd.scan_layers)
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert compiled[1].replayed >= 1


def test_arguments_that_are_refused():
    x, layers = X.to("xla"), nn.ModuleList(Block() for _ in range(2)).to("xla")
    for given_one, error, message in (
        (([*layers, print], x), TypeError, "each of the layers is of type Module; got <built-in"),
        ((layers[0], x), TypeError, "takes several modules; got one Block. Pass a ModuleList"),
        ((layers, X), DeviceMismatchError, "the x of scan_layers .* on cpu. Move it first"),
        ((layers, (x, 2)), TypeError, "the x of scan_layers consists of tensors.*got int 2"),
        (([Block(), Block()], x), DeviceMismatchError, "the tensor 'norm.weight' .* on cpu. Move"),
    ):
        with pytest.raises(error, match=message):
            spmd.scan_layers(*given_one)
    for per_layer, error, message in (
        ([x], ValueError, r"one item for each layer; got 1 items in per_layer and 2 layers"),
        ({"a": x}, ValueError, r"along its first dim; got per_layer\['a'\] of shape \(4, 6\)"),
        ((x[0], None), ValueError, r"got per_layer\[0\] of shape \(6,\) and 2 layers"),
        ([x, x.double()], ValueError, r"got \['float64\[4, 6\]'\] for layer 1 and \['float32"),
        ([1, 2.0], ValueError, r"got \['float'\] for layer 1 and \['int'\] for layer 0"),
        (
            ["a", "b"],
            TypeError,
            "a tensor or a number; got str in per_layer. Pass what is the same",
        ),
        ("ab", TypeError, "tensors, or lists .* got str in per_layer"),
        ({"scale": None}, TypeError, "got 'scale' in per_layer and as a keyword argument. Leave"),
    ):
        with pytest.raises(error, match=message):
            spmd.scan_layers(layers, x, per_layer=per_layer, scale=2)


def test_layers_that_differ():
    x = torch.zeros(4, device="xla")
    first, other = (nn.Linear(4, 4).to("xla") for _ in range(2))
    for layers, message in (
        ([first, nn.Linear(4, 4, bias=False)], r"Layer 1 has mismatched keys.*not \['bias'\]"),
        ([first, other, nn.Linear(4, 5)], r"Shape mismatch for 'weight'.*\(5, 4\) in layer 2"),
        ([first, nn.Linear(4, 4).double()], "Dtype mismatch .*float64 in layer 1.*Build them"),
        ([nn.Tanh(), nn.ReLU()], "which is a ReLU in layer 1 and a Tanh in layer 0"),
        ([nn.Dropout(), nn.Dropout().eval()], "a read of training, which is False in layer 1"),
    ):
        with pytest.raises(WrapError, match=message):
            spmd.scan_layers(layers, x)

    class Numbered(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def forward(self, x, index=None):
            return x + (self.index if index is None else index)

    with pytest.raises(WrapError, match=r"a read of index, which is 1 in layer 1 and 0 in layer 0"):
        spmd.scan_layers([Numbered(i) for i in range(3)], x)
    found = spmd.scan_layers([Numbered(i) for i in range(3)], x, per_layer={"index": [0, 1, 2]})
    assert found.tolist() == [3] * 4


def test_layers_that_do_what_no_loop_can():
    x = torch.zeros(3, 4, device="xla")

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x

    class Words(nn.Module):
        def forward(self, x):
            return "x"

    class Named(nn.Module):
        def forward(self, x):
            return x, {"name": "x"}

    class Reads(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    kept = []

    class Leaks(nn.Module):
        def forward(self, x):
            kept.append(x + 1)
            return x

    class Remembers(nn.Module):
        def forward(self, x):
            self.last = [x * 2]
            return x

    counts = [Counts().to("xla") for _ in range(2)]
    for layers, error, message in (
        (counts, ControlFlowError, "an assignment to count of a Counts. Return the new value"),
        (
            [nn.BatchNorm1d(4).to("xla") for _ in range(2)],
            ControlFlowError,
            "a write in place to running_mean of a BatchNorm1d.*call eval",
        ),
        (
            [Leaks(), Leaks()],
            ControlFlowError,
            r"float32\[3, 4\].*, in a list, closure or hook of a Leaks\. Return it",
        ),
        (
            [Remembers(), Remembers()],
            ControlFlowError,
            r"keep no tensor .*, in attribute last of a Remembers\. Return it",
        ),
        ([Reads(), Reads()], ControlFlowError, "got a read on the host.*Read before or after"),
        ([nn.Linear(4, 5).to("xla")] * 2, TypeError, r"\(here a Linear\) has the shapes .*3, 5\]"),
        ([Words()] * 2, TypeError, r"\(here a Words\) consists of tensors.*got str 'x'"),
        ([Named()] * 2, TypeError, "behind x is stacked.*got str from a Named. Leave it out"),
    ):
        with pytest.raises(error, match=message):
            spmd.scan_layers(layers, x)
    assert [layer.count.item() for layer in counts] == [0, 0]
    normed = [nn.BatchNorm1d(4).to("xla").eval() for _ in range(2)]  # as the error says
    assert spmd.scan_layers(normed, x).cpu().abs().sum() == 0
    with pytest.raises(ControlFlowError, match=r"not transformed by torch\.func"):
        torch.func.grad(lambda x: spmd.scan_layers([nn.Tanh(), nn.Tanh()], x).sum())(x)
    layers = [Again().to("xla") for _ in range(2)]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        spmd.scan_layers(layers, X.to("xla").requires_grad_(), use_reentrant=True)


def test_a_loss_that_lives_on_keeps_no_parameters_of_before_the_step():
    layers = [torch.nn.Linear(32, 32).to("xla") for _ in range(3)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    loss = spmd.scan_layers(layers, torch.ones(2, 32, device="xla") * 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    spmd.sync()
    program = spmd.metrics.programs()[-1]
    assert program.output_bytes - program.alias_bytes < 64  # the loss, and the result of checks
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
