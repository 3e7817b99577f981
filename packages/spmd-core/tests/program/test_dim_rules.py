"""The dims of operations, and what they sum; the oracle for sums is eager torch on the CPU."""

import jax
import jax.numpy as jnp
import pytest
import torch
from recorded_graphs import graph_of
from torch.nn import functional as F

import spmd_core as spmd
from spmd_core.ops.kernels import flash
from spmd_core.program.dim_rules import dims, dims_in_one_block

aten = torch.ops.aten
pytestmark = pytest.mark.one_device


def rule_of(result, name=""):
    """The rule of the operation that made a pending tensor, or of that name before it."""
    *ops, _ = graph_of(result.clone()).ops  # a copy, as the result may be a view
    op = next(op for op in reversed(ops) if name in op.entry.name)
    return dims(op.entry, [x.spec for x in op.operands])


def text(result, name=""):
    """The rule, one letter a factor: `ab,cb->ac`; then halos, replicated and summed factors."""
    rule = rule_of(result, name)

    def letters(factors):
        return "".join("ijklmnopqrst"[i] for i in sorted(factors))

    def tensors(each):
        return ",".join(
            "".join(letters(f) if len(f) < 2 else f"({letters(f)})" for f in t) for t in each
        )

    found = f"{tensors(rule.operands)}->{tensors(rule.results)}"
    for what, factors in (("halo", rule.halos), ("replicated", rule.replicated)):
        found += f" {what} {letters(factors)}" if factors else ""
    return found + "".join(f" sum {letters(sums)}" for sums in rule.sums if sums)


def on_device(*shapes):
    return [torch.randn(*shape).to("xla") for shape in shapes]


def test_dims():
    x, y, w = on_device((4, 6, 8), (4, 6, 8), (10, 8))
    assert text(x + y) == "ijk,ijk->ijk"
    assert text(x * w[:6]) == "ijk,jk->ijk"
    assert text(x.permute(2, 0, 1)) == "ijk->kij"
    assert text(x[:, None].expand(4, 5, 6, 8), "expand") == "ijk->iljk"  # the new dim is a factor
    assert text(x.view(24, 8)) == "ijk->(ij)k"
    assert text(x.view(2, 2, 48)) == "(ij)kl->ij(kl)"
    assert text(x.view(4, 3, 16)) == "i(jk)l->ij(kl)"
    assert text(x[:, 1:4]) == "ijk->ijk halo j"
    assert text(w.mm(x[0].t()), "mm") == "ij,jk->ik sum j"
    assert text(F.linear(x, w)) == "ijk,lk->ijl sum k"
    assert text(torch.bmm(x, y.mT.contiguous()), "bmm") == "ijk,ikl->ijl sum k"
    assert text(x.sum((0, 2))) == "ijk->j sum ik"
    assert text(x.amax(1)) == "ijk->ik"  # reduced, and no sum
    assert rule_of(x.amax(1)).reduced == (frozenset({1}),)


def test_what_moves_or_is_replicated():
    x, square = on_device((4, 6, 8), (5, 5))
    assert text(x.cumsum(1)) == "ijk->ijk halo j"
    assert text(x.flip(0)) == "ijk->ijk halo i"
    assert text(x.sort(0)[0]) == "ijk->ijk,ijk replicated i"
    assert text(x.erf()) == "ijk->ijk"
    assert "replicated" in text(square.diagonal())
    loop = spmd.call_jax(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * x, x), x)
    assert "replicated ijk" in text(loop)
    branch = spmd.call_jax(lambda x: jax.lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x), x)
    assert "replicated ijk" in text(branch)


def test_what_is_no_sum():
    """Nor what is computed from a sum, but by an operation that is linear in it."""
    x, w = on_device((4, 6, 8), (10, 8))
    assert [*map(set, rule_of(torch.softmax(x, -1)).sums)] == [set()]
    assert rule_of(torch.softmax(x, -1)).reduced == (frozenset({2}),)
    # Each key's exponential is divided by the sum of all.
    attended = rule_of(F.scaled_dot_product_attention(x, x, x), "attention")
    assert not attended.sums[0] and len(attended.reduced[0]) == 2
    ids = torch.randint(10, (4, 6)).to("xla")
    assert not rule_of(F.embedding(ids, w)).sums[0]
    normal, _, _ = torch.native_layer_norm(x, [8], None, None, 1e-5)
    rule = rule_of(normal)
    assert not rule.sums[0] and rule.reduced[0] == {2}
    assert set(rule.sums[1]) == {2}  # the mean: it divides by the size of the whole


def halves(x, dim):
    return [each.contiguous() for each in x.chunk(2, dim)] if dim is not None else [x, x]


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
    "convolution_backward": ["b", "acd", "acd"],  # and over positions, whose borders move
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
            if factor in rule.halos:
                continue
            dims_of = [
                next((d for d, own in enumerate(dims) if own == (factor,)), None)
                for dims in rule.operands
            ]
            parts = [halves(x, dim) for x, dim in zip(operands, dims_of)]
            first, second = ([part[side] for part in parts] for side in (0, 1))
            second = [torch.zeros_like(x) if j in once else x for j, x in enumerate(second)]
            if len(whole) > 1 and i == 0:
                continue  # its operands, halved, would not fit the other results
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


@pytest.mark.parametrize("is_backward", [False, True])
def test_an_attention_that_loops_over_blocks_keeps_batch_and_heads(is_backward, monkeypatch):
    q, k, v = (x.requires_grad_() for x in on_device((2, 3, 8, 4), (2, 3, 6, 4), (2, 3, 6, 5)))
    result = F.scaled_dot_product_attention(q, k, v)
    if is_backward:
        result.sum().backward()
        result = q.grad
    *ops, _ = graph_of(result.clone()).ops
    op = next(op for op in reversed(ops) if op.entry.traits.query is not None)
    specs = [x.spec for x in op.operands]
    whole = dims(op.entry, specs)
    assert dims_in_one_block(op.entry, specs) == whole
    monkeypatch.setattr(flash, "MAX_BLOCK", 2)
    op.entry.dims = None  # what is known of one block
    looped = dims(op.entry, specs)
    op.entry.dims = None
    assert looped.replicated.issuperset(f for dim in looped.operands[0] for f in dim)
    found = dims_in_one_block(op.entry, specs)
    assert (found.operands, found.results) == (whole.operands, whole.results)
    assert not {0, 1} & found.replicated and found.operands[0][:2] == ((0,), (1,))
    query = op.entry.traits.query
    assert found.replicated.issuperset(f for dim in found.operands[query][2:] for f in dim)
