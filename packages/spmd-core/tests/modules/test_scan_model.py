"""Tests spmd_core.modules.scan_model: models whose stacks run as loops, against eager torch."""

import copy
import io
import weakref

import pytest
import torch
from layer_models import WIDTH, Attention, Block
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, WrapError
from spmd_core.modules.fully_shard import fully_shard

X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Model(nn.Module):
    """Two stacks in one list, and another one in a Sequential between other layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([*(Block(i) for i in range(3)), *(Other() for _ in range(2))])
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), Other(), Other(), Other(), nn.Tanh())

    def forward(self, x):
        for layer in self.layers[:10]:
            x = layer(x)
        return self.last(x)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def pair(make, *args):
    """A model in eager torch, and a copy on the device whose stacks run as loops."""
    torch.manual_seed(0)
    right = make(*args)
    return right, spmd.scan_model(copy.deepcopy(right).to("xla"))


def compare(right, mine, *inputs, call=lambda model, *inputs: model(*inputs), rtol=1e-4):
    """Compares results and gradients; returns the program's operations."""
    results = []
    for model, device in ((right, "cpu"), (mine, "xla")):
        model.zero_grad()
        found = call(model, *(x.to(device) for x in inputs))
        found = found if isinstance(found, (list, tuple)) else [found]
        sum(x.float().sin().sum() for x in found if x.requires_grad).backward()
        results.append([*found, *(p.grad for p in model.parameters())])
    text = spmd.debugging.operations(*results[1])
    for expected, actual in zip(*results, strict=True):
        if expected is None:  # of a layer that was left out
            assert not actual.any()
            continue
        torch.testing.assert_close(
            actual.detach().cpu(), expected.detach(), rtol=rtol, atol=rtol / 10
        )
    return text


def num_loops(text):
    """Those that run forward; each has another one for the gradients."""
    return text.count("spmd::scan(") // 2


def test_stacks_of_a_model():
    right, mine = pair(Model)
    text = compare(right, mine, X)
    assert num_loops(text) == 3 and text.count("aten::gelu(") == 2  # forward, and again in backward
    assert [*mine.state_dict()] == [*right.state_dict()]
    assert len(mine.layers) == 5 and type(mine.layers[1]).__name__ == "Block"
    assert isinstance(mine.layers[1], Block) and repr(mine) == repr(right)
    assert spmd.scan_model(mine) is mine and num_loops(compare(right, mine, X)) == 3


def test_undo_and_paths():
    right, mine = pair(Model)
    assert spmd.scan_model(mine, undo=True) is mine
    assert type(mine.layers[0]) is Block and num_loops(compare(right, mine, X)) == 0
    spmd.scan_model(mine, "last")
    assert num_loops(compare(right, mine, X)) == 1
    spmd.scan_model(mine, ["layers", "last"])
    assert num_loops(compare(right, mine, X)) == 3
    elementary = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(WrapError, match=r"2 layers .* are one Linear each: .*\(model, ''\)"):
        spmd.scan_model(elementary)
    mine = spmd.scan_model(copy.deepcopy(elementary).to("xla"), "")
    assert num_loops(compare(elementary, mine, X)) == 1


def test_a_stack_as_several_loops():
    right, mine = pair(lambda: nn.Sequential(*(Other() for _ in range(7))))
    for loops, found in ((3, 3), (5, 3), (1, 1)):  # each of two layers or more
        assert spmd.scan_model(mine, loops=loops) is mine
        assert num_loops(compare(right, mine, X)) == found
    again = copy.deepcopy(spmd.scan_model(copy.deepcopy(mine), loops=2))
    assert num_loops(compare(right, again, X)) == 2 and num_loops(compare(right, mine, X)) == 1
    right, mine = pair(Model)  # stacks of three, two and three
    spmd.scan_model(mine, loops=2)
    assert num_loops(compare(right, mine, X)) == 3
    with pytest.raises(ValueError, match="whole number of at least 1; got 0"):
        spmd.scan_model(mine, loops=0)


def test_what_is_no_stack():
    class Numbered(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = nn.Linear(size, size)

    for model, message in (
        (nn.Linear(2, 2), "got none in a Linear. Call spmd.scan_layers"),
        (nn.ModuleList([Other(), Block()]), "In 'the model', of 1: it is a Block behind a Other"),
        (nn.ModuleList([Numbered(1), Numbered(2)]), r"of 1: .*no forward"),
        (nn.Sequential(*[Other()] * 2), "of 1: it comes twice"),
        (nn.Sequential(Block(), nn.Sequential()), "it is a Sequential behind a Block"),
    ):
        with pytest.raises(WrapError, match=message):
            spmd.scan_model(model)
    wide = Other()
    wide.linear = nn.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(WrapError, match="In 'a', of 1: Layer 1 has mismatched keys"):
        spmd.scan_model(nn.ModuleDict({"a": nn.ModuleList([Other(), wide])}))
    with pytest.raises(WrapError, match=r"'layer', which is none of Model\. Give one of \['layers"):
        spmd.scan_model(Model(), "layer")
    with pytest.raises(WrapError, match=r"'layers\.0', which is a Block of Model"):
        spmd.scan_model(Model(), "layers.0")
    with pytest.raises(TypeError, match="model is of type Module"):
        spmd.scan_model([Other(), Other()])


class Collects(nn.Module):
    """A loop that uses what each layer returns; layers return a tuple, and pass an argument on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x, bias, *, upto=4, collect=True):
        hidden, means = [x], []
        for i, layer in enumerate(self.layers):
            if i == upto:
                break
            x, bias, mean = layer(hidden_states=hidden[-1], bias=bias, scale=2.0, nothing=())
            hidden.append(x)
            means.append(mean)
        return [*hidden[1:], *means] if collect else x


class Pair(Other):
    def forward(self, hidden_states, bias, scale, nothing):
        x = super().forward(hidden_states) * scale + bias
        return x, bias, x.mean(-1)


def test_what_each_layer_returns():
    """Collected, or left early."""
    right, mine = pair(Collects)
    bias = torch.randn(WIDTH)
    text = compare(right, mine, X, bias)
    assert num_loops(text) == 1
    assert num_loops(compare(right, mine, X, bias, call=lambda m, x, b: m(x, b, upto=3))) == 1
    with torch.no_grad():
        expected = right(X, bias)
        for a, b in zip(mine(X.to("xla"), bias.to("xla")), expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_hidden_states_that_nobody_reads_cost_nothing():
    """The program has the buffers of one in which the last result alone leaves the loop."""
    sizes = []
    layers = nn.ModuleList(Other() for _ in range(6)).to("xla")
    for run in (spmd.scan_layers, lambda layers, x: nn.Sequential.forward(layers, x)):
        layers.zero_grad()
        loss = run(layers, torch.ones(64, WIDTH, device="xla")).square().mean()
        loss.backward()
        spmd.sync()
        spmd.metrics.programs()
        sizes.append(spmd.metrics.programs()[-1].temp_bytes)
        layers = spmd.scan_model(nn.Sequential(*layers))
    assert sizes[1] <= sizes[0]


@pytest.mark.one_device
def test_units_marks_and_recomputation(mesh_1d):
    """Before and after, and in captured steps."""
    right, mine = pair(Model)
    for layer in mine.layers:
        fully_shard(layer, mesh_1d, axis="x")
    x = torch.randn(max(mesh_1d.size(), 2), WIDTH)

    def call(model, x):
        if x.device.type == "xla":
            spmd.mark_sharding(x, mesh_1d, ("x", None))
        return model(x)

    assert num_loops(compare(right, mine, x, call=call)) == 3
    spmd.scan_model(mine, undo=True)
    spmd.scan_model(mine)
    assert num_loops(compare(right, mine, x, call=call)) == 3
    for layer in mine.last[1:4]:
        spmd.checkpoint_module(layer)
    compare(right, mine, x, call=call)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (right, mine)]

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = call(model, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = spmd.compile(step, capture=True, name="scanned")
    optimizers[1] = torch.optim.AdamW(mine.parameters(), lr=0.01, fused=True)
    for _ in range(4):
        expected = step(right, optimizers[0], x)
        actual = captured(mine, optimizers[1], x.to("xla"))
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-5)
    assert captured.replayed


def test_checkpoint_around_each_call():
    """As models call layers whose activations are not to be kept."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer.__call__, x, use_reentrant=False)
            return x

    compare(*pair(Again), torch.randn(2, 5, 8))


def test_copies_pickles_and_lists_that_change():
    right, mine = pair(Model)
    compare(right, mine, X)
    copied = copy.deepcopy(mine)
    assert num_loops(compare(right, copied, X)) == 3
    assert copied.layers[0]._runs_in_stack is not mine.layers[0]._runs_in_stack
    alone = copy.deepcopy(mine.layers[0])
    torch.testing.assert_close(alone(X.to("xla")).cpu(), right.layers[0](X), rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.layers[0]) is Block and num_loops(compare(right, loaded, X)) == 0
    for model in (right, mine):
        del model.layers[1]
        model.last[2] = copy.deepcopy(model.last[1])  # no layer of the stack
    assert mine.last[2]._runs_in_stack is None
    with pytest.warns(UserWarning, match="layers of last run one after another.*list has changed"):
        assert num_loops(compare(right, mine, X)) == 2
    reference = weakref.ref(mine)
    del mine, copied, loaded, model
    assert reference() is None  # at once: the stacks make no cycles


class Loop(nn.Module):
    """Calls its layers by a loop that a test gives."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Takes() for _ in range(3))

    def forward(self, x, loop):
        return loop(self.layers, x)


class Takes(Other):
    def forward(self, x, mask=None, cache=None, scale=1.0):
        return super().forward(x) * scale


def skips(layers, x):
    return layers[2](layers[0](x))


def changes(layers, x):
    for layer in layers:
        x = layer(x) * 2
    return x


def writes(layers, x):
    for layer in layers:
        x = layer(x)
        with torch.no_grad():
            x.mul_(2)
    return x


def other_mask(layers, x):
    for i in range(3):
        x = layers[i](x, mask=x.new_ones(2), scale=1.0)
    return x


def other_scale(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x, None, scale=i)
    return x


def written_mask(layers, x):
    mask = x.new_ones(2)
    for layer in layers:
        x = layer(x, {"a": [mask]})
        mask.add_(1)
    return x


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (skips, "called one after another; got a call of layer 2 of layers with what layer 0"),
        (changes, "as it is; got something else for layer 1 of layers"),
        (writes, "as it is; got something else for layer 1 of layers"),
        (other_mask, r"got another mask for layer 1 of layers than for layer 0.*per_layer\."),
        (other_scale, "got another scale for layer 1"),
        (written_mask, r"another mask\['a'\]\[0\], which was written to in between for layer 1"),
    ],
)
def test_loops_that_do_more_than_pass_on(loop, message):
    right, mine = pair(Loop)
    x = X.to("xla")
    with torch.no_grad(), pytest.raises(ControlFlowError, match=message):
        mine(x, loop)
    with torch.no_grad():
        found = mine(x, nn.Sequential.forward)  # what failed leaves nothing behind
        expected = right(X, nn.Sequential.forward)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
        spmd.scan_model(mine, undo=True)  # as it says
        torch.testing.assert_close(mine(x, loop).cpu(), right(X, loop), rtol=1e-4, atol=1e-5)


def test_objects_that_layers_may_change():
    class Cache:
        pass

    def with_cache(layers, x):
        for layer in layers:
            x = layer(x, cache=Cache())
        return x

    right, mine = pair(Loop)
    before = spmd.metrics.counter("stacks_run_layer_by_layer")
    with pytest.warns(UserWarning, match="layers run one after another.*gets cache, a Cache, whi"):
        text = compare(right, mine, X, call=lambda model, x: model(x, with_cache))
    assert num_loops(text) == 0
    compare(right, mine, X, call=lambda model, x: model(x, with_cache))  # warns once
    assert spmd.metrics.counter("stacks_run_layer_by_layer") == before + 2
    text = compare(right, mine, X, call=lambda model, x: model(x, nn.Sequential.forward))
    assert num_loops(text) == 1
    # One layer alone, and layers of a model on the CPU, run by themselves.
    with pytest.warns(UserWarning, match="layer 1 was called without layer 0"):
        found = mine.layers[1](X.to("xla"))
    torch.testing.assert_close(found.cpu(), right.layers[1](X), rtol=1e-4, atol=1e-5)
    assert torch.equal(
        spmd.scan_model(copy.deepcopy(right))(X, nn.Sequential.forward),
        right(X, nn.Sequential.forward),
    )


def test_forward_hooks_of_layers():
    """Those that look see each layer's values; those that change are on all layers."""
    right, mine = pair(Model)
    seen = {"cpu": [], "xla": []}
    handles = []
    for model, device in ((right, "cpu"), (mine, "xla")):
        for layer in model.layers:
            handles.append(
                layer.register_forward_hook(
                    lambda module, args, out, device=device: seen[device].append(out)
                )
            )
        handles.append(
            model.layers[1].register_forward_pre_hook(
                lambda module, args, kwargs, device=device: seen[device].append(args[0]),
                with_kwargs=True,
            )
        )
    assert num_loops(compare(right, mine, X)) == 3
    assert len(seen["cpu"]) == len(seen["xla"]) == 6
    for expected, actual in zip(*seen.values(), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()
    for model in (right, mine):
        for layer in model.layers:
            layer.register_forward_hook(lambda module, args, out: out * 2)
            layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    for _ in range(2):
        assert num_loops(compare(right, mine, X)) == 3
    mine.layers[1].register_forward_hook(lambda module, args, out: out * 3)
    with pytest.raises(WrapError, match="a read of _forward_hooks, which is"):
        mine(X.to("xla"))
    right, mine = pair(Model)
    mine.layers[1].register_forward_hook(lambda module, args, out: out * 3)
    with pytest.raises(ControlFlowError, match="got one of layer 1 of layers that layer 0 has not"):
        mine(X.to("xla"))


@pytest.mark.slow
def test_marks_over_two_axes_adapters_and_training(mesh_2d):
    """Layers with low-rank adapters, of which only these are trained; batches of 5 rows."""

    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
            self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)

        def forward(self, x):
            return self.linear(x) + x @ self.down.T @ self.up.T

    right, mine = pair(Model)
    torch.manual_seed(0)
    for layer in right.layers[3:]:
        layer.linear = Adapted(layer.linear)
    for layer, other in zip(mine.layers[3:], right.layers[3:], strict=True):
        layer.linear = copy.deepcopy(other.linear).to("xla")
        spmd.mark_sharding(layer.linear.linear.weight, mesh_2d, ("b", "a"))
        spmd.mark_sharding(layer.linear.down, mesh_2d, (None, ("a", "b")))
    for layer in mine.last[1:4]:
        spmd.mark_sharding(layer.linear.weight, mesh_2d, ("a", None))
    models, losses = (right, mine), []
    optimizers = [
        torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.01) for m in models
    ]
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(5, WIDTH)
        for model, optimizer, batch in zip(models, optimizers, (x, x.to("xla")), strict=True):
            loss = model(batch).square().mean()
            if step and model is mine:
                assert spmd.debugging.operations(loss).count("spmd::scan(") == 3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-4, atol=1e-5)
    for name, p in right.named_parameters():
        torch.testing.assert_close(
            mine.get_parameter(name).detach().cpu(), p.detach(), rtol=1e-3, atol=1e-4
        )


@pytest.mark.one_device
def test_functional_call():
    """Other tensors in place of the parameters, as in functional code; and their gradients."""
    right, mine = pair(Model)
    given = {name: p.detach() * 0.5 for name, p in right.named_parameters()}

    def call(model, x):
        own = {k: t.to(x.device).requires_grad_() for k, t in given.items()}
        out = torch.func.functional_call(model, own, (x,))
        return [out, *torch.autograd.grad(out.sum(), [*own.values()])]

    for actual, expected in zip(call(mine, X.to("xla")), call(right, X), strict=True):
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
