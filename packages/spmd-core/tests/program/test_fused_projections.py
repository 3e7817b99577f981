"""Sections of a fused product: which weights move, and values and gradients as of eager torch."""

import pytest
import torch
import torch.nn.functional as F
from recorded_graphs import graph_of, names, rewritten, target_of

import spmd_core as spmd
from spmd_core.program.passes.batch_sums import batch_sums
from spmd_core.program.passes.fused_projections import fused_projections

WIDTH, TOKENS = 8, 48
QKV, GROUPED = (16, 16, 16), (32, 8, 8)


def several(num_devices):
    if num_devices < 8:
        pytest.skip("needs a mesh of two axes")


def moved(*tensors):
    """The operations of the pass in the graph of pending tensors, by name."""
    graph = graph_of(*tensors)
    found = names(rewritten(fused_projections, graph))
    return {name: found.count(name) for name in found if name.endswith("_sections")}


def model(form, sizes, batch=8):
    """Data, and the parameters: of a fused product, of what reads its sections, of their sum."""
    generator = torch.Generator().manual_seed(0)
    fused = (WIDTH, sum(sizes)) if form == "addmm" else (sum(sizes), WIDTH)
    shapes = [(batch, TOKENS, WIDTH), fused, (sum(sizes),), *((WIDTH, n) for n in sizes)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def output(form, sizes, x, weight, bias, *others):
    x = x.tanh()
    if form == "addmm":  # of GPT-2
        y = torch.addmm(bias, x.view(-1, WIDTH), weight).view(*x.shape[:-1], -1)
    else:
        y = F.linear(x, weight, bias) if form == "linear" else x @ weight.t() + bias
    return sum(F.linear(part.sin(), w) for part, w in zip(y.split(sizes, -1), others))


def gradients(form, sizes, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = output(form, sizes, *leaves)
    (out * torch.linspace(-1, 1, WIDTH, device=out.device)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves)]


def marked(form, tensors, mesh, data, axis, rows=None):
    """On the device: the fused weight's columns are split by an axis, its rows by another one."""
    weight = (rows, axis) if form == "addmm" else (axis, rows)
    specs = [(data, None, None), weight, (axis,), *((None, axis) for _ in tensors[3:])]
    return [spmd.mark_sharding(t.to("xla"), mesh, spec) for t, spec in zip(tensors, specs)]


@pytest.mark.parametrize(
    ("form", "sizes", "batch", "data", "axis", "rows"),
    [
        ("addmm", QKV, 8, "a", "b", "a"),  # GPT-2 over fsdp and tensor
        ("addmm", GROUPED, 7, "a", "b", None),
        ("linear", GROUPED, 8, "b", "a", "b"),
        ("linear", QKV, 7, None, "a", "b"),
        ("matmul", (16, 24), 8, "b", "a", None),
    ],
)
def test_values_and_gradients_on_a_mesh_of_two_axes(
    mesh_2d, num_devices, form, sizes, batch, data, axis, rows
):
    tensors = model(form, sizes, batch)
    found = gradients(form, sizes, marked(form, tensors, mesh_2d, data, axis, rows))
    if num_devices == 8:
        kinds = {"order_sections": 2, "cut_sections": 1, "join_sections": 1, "restore_sections": 2}
        assert moved(*found) == kinds
    spmd.sync()
    if num_devices == 8:
        assert not any(c.kind == "all-to-all" for c in spmd.debugging.collectives())
    for ours, right in zip(found, gradients(form, sizes, tensors)):
        torch.testing.assert_close(ours.cpu(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [QKV, (64, 8, 8), (15, 15, 15)])
def test_values_and_gradients_where_one_axis_has_all_devices(mesh_1d, num_devices, sizes):
    tensors = model("linear", sizes)
    found = gradients("linear", sizes, marked("linear", tensors, mesh_1d, None, "x"))
    assert bool(moved(*found)) == (num_devices > 1 and sizes[0] % num_devices == 0)
    spmd.sync()
    for ours, right in zip(found, gradients("linear", sizes, tensors)):
        torch.testing.assert_close(ours.cpu(), right, rtol=1e-4, atol=1e-4)


def test_what_moves_is_the_weight_and_its_gradient(mesh_2d, num_devices):
    several(num_devices)
    found = gradients("addmm", QKV, marked("addmm", model("addmm", QKV), mesh_2d, "a", "b", "a"))
    spmd.sync()
    moves = [c for c in spmd.debugging.collectives() if c.kind == "collective-permute"]
    # Of three sections over two devices, each sends one of its three chunks.
    weight, bias = WIDTH // 4 * 48 // 2 // 3 * 4, 48 // 2 // 3 * 4
    assert sorted(c.operand_bytes for c in moves) == [bias, bias, weight, weight]
    assert len(found) == 7


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_move_behind_their_reduction_and_their_sum(mesh_2d, num_devices, parts):
    several(num_devices)
    tensors = model("addmm", QKV)

    def step(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        for i in range(parts):
            with torch.autocast(leaves[0].device.type, torch.bfloat16):
                out = output("addmm", QKV, leaves[0] * (i + 1), *leaves[1:])
            out.float().square().mean().backward()
        return [leaf.grad for leaf in leaves]

    found = step(marked("addmm", tensors, mesh_2d, "a", "b", "a"))
    graph = rewritten(fused_projections, rewritten(batch_sums, graph_of(*found)))
    order = names(graph)
    made = [name for name in order if name.endswith("_sections") and name != "cut_sections"]
    # Casts are ordered, each once; what the passes add up is restored once, at its end.
    assert made.count("restore_sections") == 2 and made.count("join_sections") == parts
    last = max(i for i, name in enumerate(order) if name in ("partial_sum", "mark_gradient"))
    assert order.index("restore_sections") > last
    ordered = [op for op in graph.ops if op.entry.name == "spmd::order_sections"]
    assert {op.entry.spec.dtype for op in ordered} == {torch.bfloat16}
    spmd.sync()
    for ours, right in zip(found, step(tensors)):
        torch.testing.assert_close(ours.cpu(), right, rtol=0.05, atol=0.05 * right.abs().max())


def test_a_weight_moves_before_it_is_gathered(mesh_2d, num_devices):
    several(num_devices)
    x, weight, *_ = marked("linear", model("linear", QKV), mesh_2d, "a", "b", "a")
    whole = spmd.mark_sharding(weight.bfloat16().clone(), mesh_2d, ("b", None))
    parts = (x.bfloat16() @ whole.t()).chunk(3, -1)
    made = names(rewritten(fused_projections, graph_of(*(part * 1 for part in parts))))
    at = [made.index(name) for name in ("order_sections", "clone", "mark_sharding", "t", "mm")]
    assert at == sorted(at)


def test_a_weight_that_is_computed_from_others(mesh_2d, num_devices):
    """A low-rank update is added to it."""
    several(num_devices)
    x, weight, *_ = model("linear", QKV)
    b, a = torch.randn(48, 2), torch.randn(2, WIDTH)

    def sections(x, weight, b, a):
        return [part * 2 for part in F.linear(x, weight + b @ a).chunk(3, -1)]

    marks = [("a", None, None), ("b", None), ("b", None), ()]
    ours = [
        spmd.mark_sharding(t.to("xla"), mesh_2d, mark) for t, mark in zip((x, weight, b, a), marks)
    ]
    found = sections(*ours)
    assert moved(*found) == {"order_sections": 2, "cut_sections": 1}
    for part, right in zip(found, sections(x, weight, b, a)):
        torch.testing.assert_close(part.cpu(), right, rtol=1e-4, atol=1e-4)


def test_features_that_are_joined_before_a_product(mesh_2d, num_devices):
    """The weight is split by rows: of a block whose attention and MLP end in one product."""
    several(num_devices)
    torch.manual_seed(0)
    x, w1, w2, w3 = (torch.randn(s) for s in ((8, TOKENS, 8), (32, 8), (8, 8), (8, 40)))

    def step(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        x, w1, w2, w3 = leaves
        joined = torch.cat([F.linear(x, w1).tanh(), F.linear(x, w2).sin()], -1)
        out = F.linear(joined, w3)
        out.square().mean().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    marks = [("a", None, None), ("b", None), ("b", None), (None, "b")]
    found = step(
        [spmd.mark_sharding(t.to("xla"), mesh_2d, m) for t, m in zip((x, w1, w2, w3), marks)]
    )
    made = moved(*found)
    assert made == {
        "join_sections": 1,
        "order_sections": 1,
        "cut_sections": 1,
        "restore_sections": 1,
    }
    spmd.sync()
    for ours, right in zip(found, step((x, w1, w2, w3))):
        torch.testing.assert_close(ours.cpu(), right, rtol=1e-4, atol=1e-4)


def joined_again(x, w, v):
    parts = F.linear(x, w).split([24, 8], -1)
    return [F.linear(torch.cat([part.tanh() for part in parts], -1), v)]


@pytest.mark.parametrize(
    ("function", "shapes", "marks", "kinds"),
    [
        pytest.param(
            lambda x, w: torch.bmm(x, w).chunk(2, -1),
            [(4, 96, 8), (4, 8, 32)],
            [(None, "a", None), (None, None, "b")],
            {"order_sections": 1, "cut_sections": 1, "join_sections": 1, "restore_sections": 1},
            id="experts",
        ),
        pytest.param(
            lambda x, w: [*F.linear(x, w).chunk(2, -1), *F.linear(x.sin(), w).split([8, 24], -1)],
            [(8, 48, 8), (32, 8)],
            [("a", None, None), ("b", None)],
            {"order_sections": 2, "cut_sections": 2, "join_sections": 2, "restore_sections": 2},
            id="one weight in two orders",
        ),
        pytest.param(
            joined_again,
            [(8, 48, 8), (32, 8), (8, 32)],
            [("a", None, None), ("b", None), (None, "b")],
            {"order_sections": 2, "cut_sections": 2, "join_sections": 2, "restore_sections": 2},
            id="cut and joined",
        ),
    ],
)
def test_other_products(mesh_2d, num_devices, function, shapes, marks, kinds):
    several(num_devices)
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]

    def step(tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        outs = [out * (i + 1) for i, out in enumerate(function(*leaves))]
        sum(out.square().mean() for out in outs).backward()
        return [*outs, *(leaf.grad for leaf in leaves)]

    found = step([spmd.mark_sharding(t.to("xla"), mesh_2d, m) for t, m in zip(tensors, marks)])
    assert moved(*found) == kinds
    spmd.sync()
    for ours, right in zip(found, step(tensors)):
        torch.testing.assert_close(ours.cpu(), right, rtol=1e-4, atol=1e-4)


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


@pytest.mark.parametrize(
    ("axis", "cut"),
    [
        pytest.param(None, lambda *t: linear(*t).chunk(3, -1), id="nothing is split"),
        pytest.param("a", lambda *t: linear(*t).chunk(3, -1), id="the weight is gathered"),
        pytest.param("b", lambda *t: linear(*t).chunk(3, -1)[:2], id="a section is left out"),
        pytest.param("b", lambda *t: linear(*t).chunk(3, 1), id="another dim"),
        pytest.param("b", lambda *t: linear(*t)[..., ::2].chunk(3, -1), id="every second column"),
        pytest.param("b", lambda *t: linear(*t).relu().chunk(3, -1), id="a function between"),
        pytest.param("b", lambda *t: linear(*t).split([17, 31], -1), id="uneven sections"),
        pytest.param(
            "b", lambda *t: (y := linear(*t), *y.chunk(3, -1)), id="the whole is read, too"
        ),
        pytest.param(
            "b", lambda x, w, b: linear(x[:, :1], w, b).chunk(3, -1), id="the weight is larger"
        ),
        pytest.param(
            "b", lambda x, w, b: F.conv1d(x.mT, w[:, :, None], b).chunk(3, 1), id="windows"
        ),
        pytest.param("b", lambda x, w, b: (w * 2).chunk(3, 0), id="no product"),
        pytest.param("b", lambda x, w, b: x.chunk(2, -1), id="data"),
    ],
)
def test_what_is_left_to_the_partitioner(mesh_2d, axis, cut):
    x, weight, bias, *_ = marked("linear", model("linear", QKV), mesh_2d, "a", axis)
    graph = graph_of(*(part * 1 for part in cut(x, weight, bias)))
    assert fused_projections(graph, target_of(graph)) is graph


def test_a_mark_of_the_result_is_obeyed(mesh_2d, num_devices):
    several(num_devices)

    def sections(spec):
        x, weight, bias, *_ = marked("linear", model("linear", QKV), mesh_2d, "a", "b")
        y = spmd.mark_sharding(F.linear(x, weight, bias), mesh_2d, spec)
        return [part * 1 for part in y.chunk(3, -1)]

    assert moved(*sections(("a", None, "b")))
    assert not moved(*sections(("a", None, None)))
