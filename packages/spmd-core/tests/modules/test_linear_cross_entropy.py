"""Cross entropy in chunks: values and gradients of the whole, memory, collectives, refusals."""

import pytest
import torch
import torch.nn.functional as F
from children import figures
from tiers import crossed

import spmd_core as spmd

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smooth": {"label_smoothing": 0.2},
    "weighted": {"weight": torch.linspace(0.1, 2, 24)},
    "smooth, weighted": {"weight": torch.linspace(0.1, 2, 24), "label_smoothing": 0.2},
}


def operands(rows, classes, features=8):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, features), torch.randn(classes, features)
    return x, weight, torch.randn(classes), torch.randint(classes, (rows,))


def gradients(function, leaves, target, options):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    loss = function(leaves, target, options)
    (
        loss * torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    ).sum().backward()
    return [loss.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


def whole(leaves, target, options):
    x, weight, bias = leaves
    return F.cross_entropy(F.linear(x, weight, bias), target, **options)


def chunked(num_chunks):
    def loss(leaves, target, options):
        x, weight, bias = leaves
        return spmd.linear_cross_entropy(
            x, weight, target, linear_bias=bias, num_chunks=num_chunks, **options
        )

    return loss


# Rows, chunks, and the axes that split rows and classes.
LAYOUTS = [
    (32, 4, ("a", "b")),
    (32, 1, (None, ("a", "b"))),
    (30, 4, (("a", "b"), None)),  # rows are no multiple of the devices
    (32, 5, (None, None)),  # nor of the chunks
    (3, 8, ("a", "b")),
]


@pytest.mark.one_device
@pytest.mark.parametrize(("name", "layout"), crossed([*OPTIONS], LAYOUTS))
def test_values_and_gradients_are_those_of_the_whole(mesh_2d, name, layout):
    options, (rows, num_chunks, marks) = OPTIONS[name], layout
    x, weight, bias, target = operands(rows, classes=24)
    right = gradients(whole, (x, weight, bias), target, options)
    by_row, by_class = marks
    leaves = [
        spmd.mark_sharding(t.to("xla"), mesh_2d, (axes,))
        for t, axes in ((x, by_row), (weight, by_class), (bias, by_class))
    ]
    labels = spmd.mark_sharding(target.to("xla"), mesh_2d, (by_row,))
    on_device = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    for got, correct in zip(gradients(chunked(num_chunks), leaves, labels, on_device), right):
        torch.testing.assert_close(got, correct, rtol=1e-4, atol=1e-5)


def test_uneven_classes_and_leading_dims(mesh_1d):
    x, weight, _, target = operands(12, classes=13)
    x, target = x.view(3, 4, 8), target.view(3, 4)
    right = F.cross_entropy(F.linear(x, weight).flatten(0, 1), target.flatten(), reduction="none")
    ours = spmd.mark_sharding(weight.to("xla"), mesh_1d, ("x",))
    losses = spmd.linear_cross_entropy(x.to("xla"), ours, target.to("xla"), reduction="none")
    torch.testing.assert_close(losses.cpu(), right.view(3, 4))
    on_cpu = spmd.linear_cross_entropy(x, weight, target, reduction="none")
    torch.testing.assert_close(on_cpu, right.view(3, 4))


def test_ignored_targets_are_those_with_the_given_number():
    x, weight, _, target = operands(6, classes=4)
    found = spmd.linear_cross_entropy(
        *(t.to("xla") for t in (x, weight, target)), ignore_index=int(target[0])
    )
    expected = F.cross_entropy(F.linear(x, weight), target, ignore_index=int(target[0]))
    torch.testing.assert_close(found.cpu(), expected)


def test_sixteen_bits():
    x, weight, bias, target = operands(32, classes=24)
    right = gradients(whole, (x, weight, bias), target, {})
    narrow = [t.to("xla", torch.bfloat16) for t in (x, weight, bias)]
    found = gradients(chunked(4), narrow, target.to("xla"), {})
    assert found[0].dtype == torch.float32 and found[1].dtype == torch.bfloat16
    for got, correct in zip(found, right):
        torch.testing.assert_close(got.float(), correct, rtol=0.05, atol=0.02)
    with torch.autocast("xla", torch.bfloat16):
        leaves = [t.to("xla") for t in (x, weight, bias)]
        loss = chunked(4)(leaves, target.to("xla"), {})
    torch.testing.assert_close(loss.cpu(), right[0], rtol=0.02, atol=0.02)


def test_all_ignored_large_logits_and_no_rows():
    x, weight, bias, target = (t.to("xla") for t in operands(8, classes=24))
    found = gradients(chunked(2), (x, weight, bias), torch.full_like(target, -100), {})
    assert found[0].isnan() and all(g.isnan().logical_or(g == 0).all() for g in found[1:])
    none = gradients(
        chunked(2), (x, weight, bias), torch.full_like(target, -100), {"reduction": "sum"}
    )
    assert all((g == 0).all() for g in none)
    large = gradients(chunked(3), (x * 1000, weight, bias + 500), target, {})
    right = gradients(whole, [t.cpu() for t in (x * 1000, weight, bias + 500)], target.cpu(), {})
    for got, correct in zip(large, right):
        torch.testing.assert_close(got, correct, rtol=1e-4, atol=1e-3)
    empty = spmd.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert empty.item() == 0


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch before 2.13")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torchs_function_in_chunks_is_ours(reduction):
    x, weight, bias, target = operands(32, classes=24)

    def loss(leaves, target, options):
        chunks = torch.nn.LinearCrossEntropyOptions(**options)
        return F.linear_cross_entropy(
            leaves[0], leaves[1], target, linear_bias=leaves[2], reduction=reduction, options=chunks
        )

    right = gradients(loss, (x, weight, bias), target, {})
    leaves = [t.to("xla") for t in (x, weight, bias)]
    for options in ({}, {"batch_chunk_size": 5}):
        for got, correct in zip(gradients(loss, leaves, target.to("xla"), options), right):
            torch.testing.assert_close(got, correct, rtol=1e-4, atol=1e-5)
    recorded = spmd.debugging.operations(loss(leaves, target.to("xla"), {}))
    assert "class_sums" in recorded and "addmm" not in recorded
    narrow = [t.bfloat16() for t in leaves]
    assert loss(narrow, target.to("xla"), {}).dtype == torch.bfloat16


_FIGURES = """
import json
import torch
import torch.nn.functional as F

spmd.simulate(8)
spmd.use_spmd()
mesh = spmd.Mesh(range(8), (2, 4), ("data", "tensor"))
found = {}
for name, loss_of in (
    ("whole", lambda x, w, y: F.cross_entropy(F.linear(x, w), y)),
    ("chunks", spmd.linear_cross_entropy),
):
    x = spmd.mark_sharding(torch.zeros(1024, 16).to("xla"), mesh, ("data",)).requires_grad_()
    w = spmd.mark_sharding(torch.zeros(4096, 16).to("xla"), mesh, ("tensor",)).requires_grad_()
    y = spmd.mark_sharding(torch.zeros(1024, dtype=torch.int64).to("xla"), mesh, ("data",))
    spmd.sync()
    loss = loss_of(x, w, y)
    loss.backward()
    moved = spmd.debugging.collectives(loss, x.grad, w.grad)
    spmd.sync()
    found[name] = {
        "temporary": spmd.metrics.programs()[-1].temp_bytes,
        "kinds": sorted({c.kind for c in moved}),
        "bytes": sum(c.result_bytes * (c.executions or 1) for c in moved),
    }
print(json.dumps(found))
"""


def test_memory_and_collectives(num_devices):
    """Eight chunks of logits take an eighth, and as much is exchanged as for the whole."""
    if num_devices != 8:
        pytest.skip("the mesh is of 8 devices")
    found = figures(_FIGURES)
    logits = 512 * 1024 * 4  # of a device
    assert found["whole"]["temporary"] > 2 * logits
    assert found["chunks"]["temporary"] < 0.5 * logits
    assert found["chunks"]["kinds"] == ["all-reduce"]
    assert found["chunks"]["bytes"] <= 1.05 * found["whole"]["bytes"]


def test_it_is_differentiable_once():
    x, weight, _, target = (t.to("xla") for t in operands(8, classes=24))
    leaf = x.requires_grad_()
    loss = spmd.linear_cross_entropy(leaf, weight, target)
    with pytest.raises(RuntimeError, match=r"differentiable once; got create_graph=True\."):
        torch.autograd.grad(loss, leaf, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": torch.ones(8)}, ValueError, r"got \(8,\) and \(24, 8\)"),
        ({"linear_weight": torch.ones(24, 7)}, ValueError, r"got \(32, 8\) and \(24, 7\)"),
        ({"target": torch.ones(32)}, TypeError, "int64; got torch.float32. For probabilities"),
        ({"target": torch.ones(31, dtype=torch.int64)}, ValueError, r"shape \(31,\) for an input"),
        ({"weight": torch.ones(23)}, ValueError, r"weight has one number .* got \(23,\) for 24"),
        ({"linear_bias": torch.ones(1)}, ValueError, r"linear_bias has one .* got \(1,\) for 24"),
        ({"reduction": "max"}, ValueError, "'sum' or 'none'; got 'max'"),
        ({"num_chunks": 0}, ValueError, "num_chunks is at least 1; got 0"),
    ],
)
def test_what_is_refused(changes, error, message):
    x, weight, _, target = operands(32, classes=24)
    given = {"input": x, "linear_weight": weight, "target": target, **changes}
    with pytest.raises(error, match=message):
        spmd.linear_cross_entropy(**given)
