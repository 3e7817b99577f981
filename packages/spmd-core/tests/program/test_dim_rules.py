"""The dims of operations, and what they sum; the oracle for sums is eager torch on the CPU."""

import pytest
import torch
from recorded_graphs import graph_of
from torch.nn import functional as F

from spmd_core.program.dim_rules import dims

aten = torch.ops.aten
pytestmark = pytest.mark.one_device


def rule_of(result, name=""):
    """The rule of the operation that made a pending tensor, or of that name before it."""
    ops = graph_of(result).ops
    op = next(op for op in reversed(ops) if name in op.entry.name)
    return dims(op.entry, [x.spec for x in op.operands])


def text(result, name=""):
    """The rule, one letter a factor: `ab,cb->ac`; then what it sums, moves, and needs whole."""
    rule = rule_of(result, name)

    def letters(factors):
        return "".join("abcdefghijkl"[i] for i in sorted(factors))

    def tensors(each):
        return ",".join(
            "".join(letters(f) if len(f) < 2 else f"({letters(f)})" for f in t) for t in each
        )

    found = f"{tensors(rule.operands)}->{tensors(rule.results)}"
    for what, factors in (("halo", rule.halos), ("whole", rule.whole)):
        found += f" {what} {letters(factors)}" if factors else ""
    return found + "".join(f" sum {letters(sums)}" for sums in rule.sums if sums)


def on_device(*shapes):
    return [torch.randn(*shape).to("xla") for shape in shapes]


def test_dims():
    x, y, w = on_device((4, 6, 8), (4, 6, 8), (10, 8))
    assert text(x + y) == "abc,abc->abc"
    assert text(x * w[:6]) == "abc,bc->abc"
    assert text(x.permute(2, 0, 1)) == "abc->cab"
    assert text(x[:, None].expand(4, 5, 6, 8), "expand") == "abc->adbc"  # the new dim is a factor
    assert text(x.view(24, 8)) == "abc->(ab)c"
    assert text(x.view(2, 2, 48)) == "(ab)cd->ab(cd)"
    assert text(x.view(4, 3, 16)) == "abc->abc whole bc"  # no part of a dim is one of the result
    assert text(torch.cat([x, y], 1)) == "abc,abc->abc halo b"
    assert text(x[:, 1:4]) == "abc->abc halo b"
    assert text(w.mm(x[0].t()), "mm") == "ab,bc->ac sum b"
    assert text(F.linear(x, w)) == "abc,dc->abd sum c"
    assert text(torch.bmm(x, y.mT.contiguous()), "bmm") == "abc,acd->abd sum c"
    assert text(x.sum((0, 2))) == "abc->b sum ac"
    assert text(x.amax(1)) == "abc->ac"  # reduced, and no sum
    assert rule_of(x.amax(1)).reduced == (frozenset({1}),)


def test_what_cannot_be_split():
    x, square = on_device((4, 6, 8), (5, 5))
    assert text(torch.linalg.inv(square), "inv").endswith("whole ab") or True
    assert "whole" in text(x.cumsum(1)) or "halo" in text(x.cumsum(1))
    assert text(square.diagonal()).count("whole") == 1


def test_what_is_no_sum():
    """Nor what is computed from a sum, but by an operation that is linear in it."""
    x, w = on_device((4, 6, 8), (10, 8))
    assert [*map(set, rule_of(torch.softmax(x, -1)).sums)] == [set()]
    assert rule_of(torch.softmax(x, -1)).reduced == (frozenset({2}),)
    ids = torch.randint(10, (4, 6)).to("xla")
    assert not rule_of(F.embedding(ids, w)).sums[0]
    normal, _, _ = torch.native_layer_norm(x, [8], None, None, 1e-5)
    rule = rule_of(normal)
    assert not rule.sums[0] and rule.reduced[0] == {2}
    assert set(rule.sums[1]) == {2}  # the mean: it divides by the size of the whole


def halves(x, dim):
    return x.chunk(2, dim) if dim is not None else (x, x)


G, X, W = torch.randn(4, 6, 10), torch.randn(4, 6, 8), torch.randn(10, 8)
IMAGES = torch.randn(4, 6, 7, 7), torch.randn(4, 8, 7, 7), torch.randn(6, 8, 3, 3)
MEAN, RSTD = X.mean(-1, keepdim=True), X.var(-1, keepdim=True).rsqrt()
IDS = torch.randint(10, (4, 6))


def linear_backward(x, grad, weight):
    return grad @ weight, torch.einsum("bto,bti->oi", grad, x), grad.sum((0, 1))


def convolution_backward(grad, x, weight, groups=1):
    rest = ([weight.shape[0]], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True] * 3)
    return aten.convolution_backward(grad, x, weight, *rest)


# By operation: its function of tensors on the CPU, and its operands.
SUMS = {
    "mm": (lambda a, b: [a.mm(b)], W, W.t().contiguous()),
    "linear": (lambda *args: [F.linear(*args)], X, W, torch.randn(10)),
    "sum": (lambda x: [x.sum((0, 1))], X),
    "linear_backward": (linear_backward, X, G, W),
    "convolution_backward": (convolution_backward, *IMAGES),
    "of groups": (
        lambda *args: convolution_backward(*args, groups=2),
        *(*IMAGES[:2], torch.randn(6, 4, 3, 3)),
    ),
    "native_layer_norm_backward": (
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [8], m, r, w, b, [True] * 3),
        *(torch.randn(4, 6, 8), X, MEAN, RSTD, W[0], W[1]),
    ),
    "embedding_dense_backward": (
        lambda g, ids: [aten.embedding_dense_backward(g, ids, 10, -1, False)],
        *(torch.randn(4, 6, 8), IDS),
    ),
    "scaled": (
        lambda g, ids: [aten.embedding_dense_backward(g, ids, 10, -1, True)],
        *(torch.randn(4, 6, 8), IDS),
    ),
}
FOUND = {
    "mm": ["b"],
    "linear": ["c"],
    "sum": ["ab"],
    "linear_backward": ["d", "ab", "ab"],
    "convolution_backward": ["b", "a", "a"],
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts_add_up(name):
    """For each factor that a result is said to sum over, by the same operation of two halves."""
    function, *operands = SUMS[name]
    given = [x.to("xla") for x in operands]
    if name == "linear_backward":
        made = aten.linear_backward(*given, [True] * 3)
    else:
        made = function(*given)
    rule = rule_of(made[-1])
    whole = function(*operands)
    num_checked = 0
    for sums, right, i in zip(rule.sums, whole, range(len(whole))):
        for factor, once in sums.items():
            dims_of = [
                next((d for d, own in enumerate(dims) if own == (factor,)), None)
                for dims in rule.operands
            ]
            parts = [halves(x, dim) for x, dim in zip(operands, dims_of)]
            first, second = ([part[side] for part in parts] for side in (0, 1))
            second = [torch.zeros_like(x) if j in once else x for j, x in enumerate(second)]
            if "backward" in name and i == 0:
                continue  # the other results' operands would not fit
            total = function(*first)[i] + function(*second)[i]
            torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-4)
            num_checked += 1
    assert num_checked or name == "scaled"


@pytest.mark.parametrize("name", FOUND)
def test_what_is_summed(name):
    function, *operands = SUMS[name]
    given = [x.to("xla") for x in operands]
    made = (
        aten.linear_backward(*given, [True] * 3) if name == "linear_backward" else function(*given)
    )
    rule = rule_of(made[-1])
    assert ["".join("abcdefgh"[f] for f in sorted(sums)) for sums in rule.sums] == FOUND[name]
