"""Tests spmd_core.modules.layer_state: what layers of a loop write in place, as in eager torch."""

import copy

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import ControlFlowError, WrapError
from spmd_core.program import compile_cache

COUNT, ROWS, LENGTH, WIDTH = 3, 2, 5, 6


class Cached(nn.Module):
    """Writes its input into a cache at a position, counts its calls, and reads both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, position, cache, calls):
        cache[:, position] = x[:, None]
        calls.add_(1)
        return torch.tanh(self.linear(cache.sum(1)) + calls)


class Counting(nn.Module):
    """Does with the tensors that it gets what a function says."""

    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, x, **own):
        return self.act(self.linear(x), **own)


def one_by_one(layers, x, *args, per_layer):
    for i, layer in enumerate(layers):
        own = {name: stack[i] for name, stack in per_layer.items()}
        x = layer(x, *args, **own)
    return x


def both(layers, act, **per_layer):
    """What layers compute and leave in their arguments, in eager torch and as a loop."""
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    found = []
    for run, device in ((one_by_one, "cpu"), (spmd.scan_layers, "xla")):
        some = [Counting(act).to(device) for _ in layers]
        for layer, source in zip(some, layers, strict=True):
            layer.load_state_dict(source.state_dict())
        own = {name: stack.clone().to(device) for name, stack in per_layer.items()}
        with torch.no_grad():
            y = run(some, x.to(device), per_layer=own)
        found.append([y.cpu(), *(stack.cpu() for stack in own.values())])
    torch.testing.assert_close(found[1], found[0])


def counting(act=None, count=COUNT):
    torch.manual_seed(0)
    return [Counting(act) for _ in range(count)]


SPLITS = {
    "heads": ("x", (None, None, "x")),
    "rows": ("x", ("x", None, None)),
    "two axes": ("ab", ("b", None, "a")),
    "uneven": ("ab", (None, ("a", "b"), None)),
    "no mark": ("x", None),
}


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_caches_of_layers(split, as_list, mesh_1d, mesh_2d):
    """Step by step, in one stack or a tensor for each layer; no device has a second cache."""
    axes, spec = SPLITS[split]
    mesh = mesh_1d if axes == "x" else mesh_2d
    torch.manual_seed(0)
    right = [Cached() for _ in range(COUNT)]
    mine = [copy.deepcopy(layer).to("xla") for layer in right]
    width = 64  # long enough to tell its size from all other memory
    caches = torch.randn(COUNT, ROWS, width, WIDTH)
    calls = torch.zeros(COUNT, dtype=torch.int64)
    own = {"cache": caches.to("xla"), "calls": calls.to("xla")}
    if as_list:
        own = {name: [t.clone() for t in stack] for name, stack in own.items()}
    tensors = own["cache"] if as_list else [own["cache"]]
    for tensor in tensors if spec is not None else ():
        spmd.mark_sharding(tensor, mesh, spec if as_list else (None, *spec))
    before = [t._handle.storage for t in tensors]
    for step in range(3):
        x, position = torch.randn(ROWS, WIDTH), torch.tensor([step])
        with torch.no_grad():
            expected = one_by_one(right, x, position, per_layer={"cache": caches, "calls": calls})
            found = spmd.scan_layers(mine, x.to("xla"), position.to("xla"), per_layer=own)
        assert "spmd::put_in_row(" in spmd.debugging.passes(found)
        spmd.sync()
        torch.testing.assert_close(found.cpu(), expected)
    record = compile_cache.newest().record
    bytes_of_all = caches.numel() * 4 // (mesh.size() if split in ("heads", "rows") else 1)
    if split == "no mark" or mesh.size() == 1:
        assert record.alias_bytes >= bytes_of_all > 2 * record.temp_bytes
    for name, stack in (("cache", caches), ("calls", calls)):
        now = torch.stack([t.cpu() for t in own[name]]) if as_list else own[name].cpu()
        torch.testing.assert_close(now, stack)
    assert [t._handle.storage for t in tensors] == before
    assert all(t.sharding_spec == tensors[0].sharding_spec for t in tensors)


def in_a_slice(x, a):
    a[1:3].mul_(2)
    a.t()[0] = 7
    return x + a.sum(0)[:WIDTH]


def twice_and_read_before(x, a, b):
    old = a.sum()
    a[torch.tensor([0, 2], device=a.device)] = x[:1] + b[:2]
    b.index_copy_(0, torch.tensor([4, 1], device=a.device), x)
    a.index_add_(0, torch.tensor([1, 1], device=a.device), x)
    return x + old + a.mean() * b.sum()


def by_a_mask(x, a):
    a[a > 0] = 0.5
    a.masked_fill_(a < -1, 2)
    return x + a.sum()


def read_only_and_not_at_all(x, a, b):
    return x + a.sum()


@pytest.mark.parametrize(
    "act", [in_a_slice, twice_and_read_before, by_a_mask, read_only_and_not_at_all]
)
def test_writes_of_all_kinds(act, num_devices):
    torch.manual_seed(2)
    own = {"a": torch.randn(COUNT, LENGTH, WIDTH), "b": torch.randn(COUNT, LENGTH, WIDTH)}
    if act in (in_a_slice, by_a_mask):
        del own["b"]
    both(counting(), act, **own)
    both(counting(count=1), act, **{name: stack[:1] for name, stack in own.items()})


def test_random_numbers_are_drawn_once():
    """As those of layers that write nothing, although these are recorded again."""
    x = torch.ones(ROWS, WIDTH, device="xla")
    results = []
    for act in (
        lambda y, a: nn.functional.dropout(y, 0.5) + a,
        lambda y, a: nn.functional.dropout(y, 0.5) + a.add_(0),
    ):
        layers = [layer.to("xla") for layer in counting(act)]
        torch.manual_seed(5)
        a = torch.zeros(COUNT, WIDTH, device="xla")
        with torch.no_grad():
            y = spmd.scan_layers(layers, x, per_layer={"a": a})
        results.append((y.cpu(), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_what_has_no_right_value_is_refused():
    x, state = torch.ones(ROWS, WIDTH, device="xla"), torch.zeros(COUNT, WIDTH, device="xla")

    def run(act, **own):
        layers = [layer.to("xla") for layer in counting(act)]
        return spmd.scan_layers(layers, x, per_layer=own)

    def write(y, a):
        a.copy_(y[0])
        return y

    def with_another(y, a, b):
        return write(y, a) + b

    def closes_over(y, a):
        return write(y, a) + state.sum()

    def replaces(y, a):
        a.data = a + 1
        return y

    with pytest.raises(ControlFlowError, match=r"got a write to per_layer\['a'\] of a value that"):
        run(write, a=state)
    needs = torch.zeros(COUNT, WIDTH, device="xla", requires_grad=True) * 2
    with pytest.raises(ControlFlowError, match=r"of per_layer\['a'\], which requires one\. Call"):
        run(torch.no_grad()(write), a=needs)
    with torch.no_grad():
        for act, own, message in (
            (with_another, {"a": state, "b": state}, r"nothing else.*of per_layer\['a'\], which d"),
            (with_another, {"a": state, "b": state.view(-1).view_as(state)}, r"nothing else that"),
            (closes_over, {"a": state}, r"got float32\[3, 6\], of per_layer\['a'\], which does"),
            (replaces, {"a": state}, r"gives per_layer\['a'\], of float32\[6\], other memory"),
            (lambda y, a: y + a.add_(1), {"a": [1, 2, 3]}, r"number in per_layer\['a'\]\. Give"),
            (write, {"a": [state[0], state[0], state[1]]}, r"shares its memory with nothing else"),
        ):
            with pytest.raises(ControlFlowError, match=message):
                run(act, **own)
    assert not state.any().item()
    run(write_detached, a=state)
    torch.testing.assert_close(state.sum(1).ne(0).cpu(), torch.ones(COUNT, dtype=torch.bool))


def write_detached(y, a):
    a.copy_(y[0].detach())
    return y


def test_gradients_beside_what_is_written():
    """Through what layers return, where they write what is detached."""
    found = []
    for run, device in ((one_by_one, "cpu"), (spmd.scan_layers, "xla")):
        layers = [layer.to(device) for layer in counting(write_and_read)]
        torch.manual_seed(3)
        x = torch.randn(ROWS, WIDTH).to(device).requires_grad_()
        state = torch.randn(COUNT, ROWS, WIDTH).to(device)
        y = run(layers, x, per_layer={"a": state})
        y.square().sum().backward()
        grads = [layer.linear.weight.grad for layer in layers]
        found.append([t.detach().cpu() for t in (y, state, x.grad, *grads)])
    torch.testing.assert_close(found[1], found[0])


def write_and_read(y, a):
    a[:, torch.tensor([0, 3], device=a.device)] = y[:, :2].detach()
    kept = a.clone()
    return y * kept + kept.sin()


def test_marks_that_differ(mesh_1d):
    layers = [layer.to("xla") for layer in counting(write_detached)]
    own = [torch.zeros(WIDTH, device="xla") for _ in range(COUNT)]
    spmd.mark_sharding(own[1], mesh_1d, ("x",))
    with pytest.raises(WrapError, match=r"got per_layer\['a'\] with the mark .* in layer 1"):
        spmd.scan_layers(layers, torch.ones(ROWS, WIDTH, device="xla"), per_layer={"a": own})
