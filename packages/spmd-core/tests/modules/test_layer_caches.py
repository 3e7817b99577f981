"""Tests spmd_core.modules.layer_caches: caches that layers of a loop write, as in eager torch."""

import copy
import operator

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.errors import ControlFlowError
from spmd_core.modules.layer_caches import LayerNumber

COUNT, WIDTH, LENGTH = 4, 6, 5


class Part:
    """One layer's part of a cache."""

    def __init__(self, device, shared):
        self.keys = torch.zeros(2, LENGTH, WIDTH, device=device)
        self.seen = (torch.zeros((), dtype=torch.int64, device=device), shared)
        self.is_set, self.name = True, "part"

    def update(self, new):
        self.keys[:, self.seen[1]] = new[:, None]
        self.seen[0].add_(1)
        return self.keys


class Cache:
    def __init__(self, parts):
        self.layers, self.kind = parts, "cache"

    def update(self, new, number):
        return self.layers[number].update(new)


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), number
        self.act = lambda module, cache, y: cache.update(y, module.number).sum(1)

    def forward(self, x, cache=None):
        y = self.linear(x)
        return x + torch.tanh(self.act(self, cache, y))


class Model(nn.Module):
    def __init__(self, act=None, numbers=range(COUNT)):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in numbers)
        for layer in self.layers if act is not None else ():
            layer.act = act

    def forward(self, x, cache, count=COUNT, between=lambda i, cache: None):
        for i, layer in enumerate(self.layers[:count]):
            between(i, cache)
            x = layer(x, cache=cache)
        return x


def make_cache(device, position=1, count=COUNT):
    shared = torch.tensor([position]).to(device)
    return Cache([Part(device, shared) for _ in range(count)])


def pair(act=None, **options):
    torch.manual_seed(0)
    right = Model(act, **options)
    return right, spmd.scan_model(copy.deepcopy(right).to("xla"))


def compare(right, mine, make=make_cache, **options):
    """Three steps; returns how many ran layer by layer."""
    before = spmd.metrics.counter("stacks_run_layer_by_layer")
    caches = [make(device) for device in ("cpu", "xla")]
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(2, WIDTH)
        with torch.no_grad():
            expected = right(x, caches[0], **options)
            found = mine(x.to("xla"), caches[1], **options)
        torch.testing.assert_close(found.cpu(), expected)
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(b.keys.cpu(), a.keys)
        torch.testing.assert_close(b.seen[0].cpu(), a.seen[0])
    return spmd.metrics.counter("stacks_run_layer_by_layer") - before


def test_each_layer_writes_its_part(mesh_2d):
    assert compare(*pair()) == 0

    def marked(device):
        cache = make_cache(device)
        for part in cache.layers if device == "xla" else ():
            spmd.mark_sharding(part.keys, mesh_2d, (None, "b", "a"))
        return cache

    assert compare(*pair(), marked) == 0
    # Numbers in another order, in a longer list.
    numbers = [2, 5, 0, 3]
    assert compare(*pair(numbers=numbers), lambda device: make_cache(device, count=6)) == 0


def test_one_loop_and_no_copy_of_the_caches():
    _, mine = pair()
    cache = make_cache("xla")
    with torch.no_grad():
        result = mine(torch.ones(2, WIDTH, device="xla"), cache)
    text = spmd.debugging.operations(result, *(part.keys for part in cache.layers))
    assert text.count("spmd::scan(") == text.count("aten::tanh") == 1


def test_a_model_that_calls_the_first_layers_alone():
    """The parts of the others stay as they were."""
    assert compare(*pair(), count=2) == 0


def test_under_capture():
    right, mine = pair()
    eager, cache = make_cache("cpu"), make_cache("xla")
    step = spmd.compile(torch.no_grad()(lambda x: mine(x, cache)), capture=True)
    torch.manual_seed(1)
    for _ in range(5):
        x = torch.randn(2, WIDTH)
        with torch.no_grad():
            expected = right(x, eager)
        torch.testing.assert_close(step(x.to("xla")).cpu(), expected)
    assert step.replayed == 3, step.reason
    for a, b in zip(eager.layers, cache.layers, strict=True):
        torch.testing.assert_close(b.keys.cpu(), a.keys)


def assigns(module, cache, y):
    part = cache.layers[module.number]
    part.keys = part.keys + y[:, None]
    return part.keys.sum(1)


def counts(module, cache, y):
    return cache.update(y, module.number).sum(1) * len(cache.layers)


def first_of(module, cache, y):
    return cache.update(y, module.number).sum(1) + cache.layers[0].keys.sum(1)


def computes(module, cache, y):
    return cache.update(y, module.number).sum(1) * module.number


def marks(module, cache, y):
    cache.kind = "used"
    return cache.update(y, module.number).sum(1)


def has_a_list(device):
    cache = make_cache(device)
    for part in cache.layers:
        part.log = {1, 2}
    return cache


def differs(device):
    cache = make_cache(device)
    cache.layers[1].name = "another"
    return cache


def shares(device):
    cache = make_cache(device)
    for part in cache.layers[1:]:
        part.keys = cache.layers[0].keys.view(-1).view(2, LENGTH, WIDTH)
    return cache


def inside(device):
    cache = make_cache(device)
    cache.layers = tuple(cache.layers)
    return cache


ONE_BY_ONE = {
    "assigns": (assigns, make_cache, "it assigns attributes"),
    "counts": (counts, make_cache, "how many layers there are"),
    "first of": (first_of, make_cache, "asks for the object of layer 0"),
    "computes": (computes, make_cache, "got a read of number, which is 1 in layer 1"),
    "marks": (marks, make_cache, "it assigns attributes"),
    "a set": (None, has_a_list, "have a set that may change"),
    "differs": (None, differs, "have a str that may change, or differ"),
    "shares": (None, shares, "shares its memory with nothing else"),
    "a tuple": (None, inside, "no list `layers`"),
}


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_what_cannot_be_in_a_loop_runs_one_by_one(case):
    act, make, message = ONE_BY_ONE[case]
    right, mine = pair(act)
    with pytest.warns(UserWarning, match=rf"one after another.*cache, a Cache, .*{message}"):
        # What is assigned again is what is there, in the later steps.
        assert compare(right, mine, make) == (1 if case == "marks" else 3)


def test_gradients_run_one_by_one():
    right, mine = pair()
    with pytest.warns(UserWarning, match=r"it takes torch\.no_grad"):
        found = mine(torch.ones(2, WIDTH, device="xla"), make_cache("xla"))
    found.sum().backward()
    right(torch.ones(2, WIDTH), make_cache("cpu")).sum().backward()
    for a, b in zip(right.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_layers_with_hooks_run_one_by_one():
    right, mine = pair()
    seen = []
    mine.layers[1].register_forward_hook(lambda module, args, y: seen.append(y))
    with pytest.warns(UserWarning, match="a loop cannot: the layers have forward hooks"):
        assert compare(right, mine) == 3
    assert len(seen) == 3


def test_writes_between_the_layers_are_refused():
    def writes(i, cache):
        if i == 2:
            cache.layers[2].keys.zero_()

    def replaces(i, cache):
        if i == 2:
            cache.layers[2].keys = torch.zeros_like(cache.layers[2].keys)

    for between in (writes, replaces):
        _, mine = pair()
        with (
            torch.no_grad(),
            pytest.raises(ControlFlowError, match=r"another write to that of layer 2\. Write b"),
        ):
            mine(torch.ones(2, WIDTH, device="xla"), make_cache("xla"), between=between)


def test_a_number_serves_for_nothing_else():
    number = LayerNumber("got a read")
    assert number is not None
    for act in (
        lambda: number == 0,
        lambda: number + 1,
        lambda: 2 * number,
        lambda: 3 - number,
        lambda: bool(number),
        lambda: int(number),
        lambda: [1, 2][number],
        lambda: f"{number}",
        lambda: number < 3,
        lambda: {number: 1},
        lambda: operator.index(number),
        lambda: range(number),
    ):
        with pytest.raises((ControlFlowError, TypeError)):
            act()
