"""Programs that XLA's partitioner gets wrong without the rules, against eager torch."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import crossed, exhaustive

import spmd_core as spmd
from spmd_core.graph.values import Spec
from spmd_core.program import split_dims
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.splits import Splits

Make = Callable[[torch.Tensor], torch.Tensor]


def axis(count: int) -> spmd.Mesh:
    """A mesh of one axis over the first devices."""
    if spmd.global_runtime_device_count() < count:
        pytest.skip(f"needs {count} devices")
    return spmd.Mesh(range(count), (count,), ("a",))


def written_through_a_reshape(x: torch.Tensor) -> torch.Tensor:
    y = x[:16].clone()
    y.view(4, 4, -1).mul_(2)
    return y


# How a tensor of 16 rows is computed from one of 20 in the same program.
COMPUTED: dict[str, Make] = {
    "slice": lambda x: x[:16].clone(),
    "cat": lambda x: torch.cat([x[:7], x[11:]]),
    "pad": lambda x: F.pad(x[:12], (0, 0, 1, 3)),
    "roll": lambda x: x[:16].roll(3, 0),
    "sort": lambda x: x[:16].sort(0, descending=True).values,
    "transposed copy": lambda x: x[:16].t().clone().t().contiguous(),
    "reshape": lambda x: x[:16].reshape(2, 8, -1).transpose(0, 1).reshape(16, -1),
    "written through a reshape": written_through_a_reshape,
}


def put(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y[at] = 70.0
    return y


def add_in_place(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y[at] += 70.0
    return y


def row(y: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((1, y.shape[1]), value, device=y.device)


# Writes at one index.
WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "put": put,
    "add in place": add_in_place,
    "index_add": lambda y, at: y.index_add(0, at, row(y, 3.0)),
    "index_copy": lambda y, at: y.index_copy(0, at, row(y, 3.0)),
    "index_fill": lambda y, at: y.index_fill(0, at, 4.0),
    "index_put, a 0-dim index": lambda y, at: y.index_put((at[0],), torch.tensor(5.0).to(y)),
    "scatter": lambda y, at: y.scatter(0, at[:, None].expand(1, y.shape[1]), 6.0),
    "index_reduce": lambda y, at: y.index_reduce(0, at, row(y, 3.0), "amax"),
    "two dims": lambda y, at: y.index_put((at, at * 0 + 1), torch.tensor(5.0).to(y)),
}
# Every way to compute with one way to write, and every way to write after a slice.
CASES = [
    (computed, written) if "slice" in computed or written == "put" else None
    for computed, written in itertools.product(COMPUTED, WRITTEN)
]


@pytest.mark.parametrize("count", [2, exhaustive(3), 4, exhaustive(8)])
@pytest.mark.parametrize(("computed", "written"), [case for case in CASES if case])
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
def test_a_row_written_at_a_tensor_index(computed, written, count):
    mesh = axis(count)
    rows = torch.arange(40.0).view(20, 2)
    expected = WRITTEN[written](COMPUTED[computed](rows.clone()), torch.tensor([5]))
    results = []
    for marks_rows in (True, False):
        x = rows.to("xla")
        if marks_rows:
            spmd.mark_sharding(x, mesh, ("a",))
        y = COMPUTED[computed](x)
        if not marks_rows:
            spmd.mark_sharding(y, mesh, ("a",))
        results.append(WRITTEN[written](y, torch.tensor([5], device="xla")))
    for result in results:
        torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("count", [2, 4])
def test_a_cache_that_is_written_at_one_position_after_the_other(count):
    mesh = axis(count)
    x, eager = torch.arange(40.0).view(20, 2).to("xla"), torch.arange(40.0).view(20, 2)
    spmd.mark_sharding(x, mesh, ("a",))
    for position in range(7):
        for t in (x, eager):
            y = t[:16].clone()
            y[position] = 100.0 + position  # a number, which changes from program to program
            y[position : position + 2] += 1
            t[:16] = y
        torch.testing.assert_close(x.cpu(), eager)


def scatter_adds(device: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Operations that add up rows of the float tensor (n, 2) made from n indices."""
    table = torch.ones(12, 2, device=device, requires_grad=True)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return lambda ids: torch.autograd.grad(function(ids).sum(), table)[0]

    def source(ids: torch.Tensor) -> torch.Tensor:
        return ids.to(torch.float32)[..., None].expand(*ids.shape, 2) * 1.0

    zeros = torch.zeros(12, 2, device=device)
    return {
        "embedding": gradient(lambda ids: F.embedding(ids, table)),
        "index": gradient(lambda ids: table[ids]),
        "index_select": gradient(lambda ids: table.index_select(0, ids.flatten())),
        "index_add": lambda ids: zeros.index_add(0, ids.flatten(), source(ids.flatten())),
        "scatter_add": lambda ids: zeros.scatter_add(
            0, ids.flatten()[:, None].expand(-1, 2), source(ids.flatten())
        ),
        "index_put": lambda ids: zeros.index_put((ids,), source(ids), accumulate=True),
        "index_reduce": lambda ids: zeros.index_reduce(
            0, ids.flatten(), source(ids.flatten()), "mean", include_self=False
        ),
    }


@pytest.mark.parametrize(
    ("name", "shape"), crossed([*scatter_adds("cpu")], [(6,), (6, 3), (5,), (1,), (8,)], rounds=2)
)
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
def test_updates_that_are_split_unevenly_over_one_of_two_axes(name, shape, mesh_2d):
    ids = torch.arange(torch.Size(shape).numel()).view(shape) % 11 + 1  # none is 0
    expected = scatter_adds("cpu")[name](ids)
    marked = spmd.mark_sharding(ids.to("xla"), mesh_2d, ("a",))
    torch.testing.assert_close(scatter_adds("xla")[name](marked).cpu(), expected)


def test_updates_that_are_split_unevenly_along_a_later_dim(mesh_2d):
    source = torch.ones(4, 3) * 1
    index = torch.tensor([1, 2, 3])
    expected = torch.zeros(4, 4).index_add(1, index, source)
    marked = spmd.mark_sharding(source.to("xla") * 1, mesh_2d, (None, "a"))
    result = torch.zeros(4, 4, device="xla").index_add(1, index.to("xla"), marked)
    torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize(("size", "start", "step"), [(2, 1, 3), (5, 4, 5), (5, 4, 3), (8, 7, 3)])
def test_a_slice_with_a_step_that_keeps_one_element(size, start, step, mesh_1d):
    eager = torch.arange(1.0, size + 1)
    x = spmd.mark_sharding(eager.to("xla"), mesh_1d, ("x",))
    torch.testing.assert_close((x * 10)[start::step].add(1).cpu(), (eager * 10)[start::step].add(1))
    z, w = eager * 10, x * 10
    for t in (z, w):
        t[start::step].mul_(3)
    torch.testing.assert_close(w.cpu(), z)


@pytest.mark.parametrize(
    ("out", "offset"), crossed([("a", "b"), ("b", "a"), (None, "a"), ("b",)], [0, 2, -3])
)
def test_the_diagonal_of_a_split_tensor(out, offset, mesh_2d):
    eager = torch.arange(1.0, 257.0).view(8, 8, 4)
    eager[3, 3, 1], eager[2, 2, 0] = float("nan"), -0.0
    for spec in (("a",), (None, "a"), ("b", "a"), ("a", None, "b")):
        x = spmd.mark_sharding(eager.to("xla"), mesh_2d, spec)
        y = spmd.mark_sharding(x.diagonal(offset) * 1, mesh_2d, out)
        torch.testing.assert_close(y.cpu(), eager.diagonal(offset), equal_nan=True)
        z = spmd.mark_sharding(torch.einsum("iij->ij", x), mesh_2d, out)
        torch.testing.assert_close(z.cpu(), torch.einsum("iij->ij", eager), equal_nan=True)
        assert (1 / x.diagonal().cpu()[0, 2]).item() == float("-inf")  # the zero keeps its sign


def in_loops(x: jax.Array, index: jax.Array) -> jax.Array:
    """One write at one index in each kind of function that jax calls from a program."""

    def write(x: jax.Array) -> jax.Array:
        return x.at[index].add(1.0)

    x = jax.jit(write)(x)
    x, _ = jax.lax.scan(lambda carry, _: (write(carry), None), x, None, length=2)
    x = jax.lax.while_loop(lambda x: jnp.sum(x.at[index].add(0.5)) < 130, write, x)
    x = jax.lax.cond(jnp.sum(x) > 0, write, lambda x: x, x)
    with_rule = jax.custom_jvp(write)
    with_rule.defjvps(lambda tangent, out, x: tangent)
    return with_rule(x)


def test_the_rules_hold_inside_of_jaxs_loops_and_calls(mesh_1d, num_devices):
    rows = torch.arange(16.0).view(16, 1)
    index = torch.tensor([5])
    expected = in_loops(jnp.asarray(rows.numpy()), jnp.asarray(index.numpy()))
    x = spmd.mark_sharding(torch.cat([rows, rows]).to("xla"), mesh_1d, ("x",))
    result = spmd.call_jax(in_loops, x[:16].clone(), index.to("xla"))
    torch.testing.assert_close(result.cpu(), torch.tensor(expected.tolist()))


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [4, exhaustive(8)])
@pytest.mark.parametrize("repeated", ["repeat", "repeat_interleave", "expand"])
def test_a_repeated_tensor_is_flipped(repeated, rows, count):
    mesh = axis(count)
    x = torch.arange(8.0 * rows).view(rows, 8)
    functions = {
        "repeat": lambda x: x.repeat(2, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
        "expand": lambda x: x[None].expand(2, -1, -1).reshape(-1, 8),
    }

    def flipped(x, mark):
        y = functions[repeated](mark(x * 1))
        return mark(y.flip(0)), mark(y.flip(0, 1) * 2)

    def mark(x):
        return spmd.mark_sharding(x, mesh, ("a", None))

    for mine, right in zip(flipped(x.to("xla"), mark), flipped(x, lambda x: x)):
        torch.testing.assert_close(mine.cpu(), right)


BORDERS = {
    "running": lambda x: [
        x.cumsum(1), x.cumprod(1), x.cummax(1)[0], x.cummin(1)[0], x.logcumsumexp(1)
    ],
    "pooling": lambda x: [
        f(y[None], 3, 2, 1)
        for y in (x, -x)
        for f in (F.max_pool1d, F.avg_pool1d, lambda *args: F.lp_pool1d(args[0] + 5, 2.0, 3, 2))
    ],
    "padding": lambda x: [
        F.pad(x, edges, value=value)
        for value in (0.0, 9.0, -1.0, math.inf)
        for edges in ((1, 0), (2, 3), (-1, 1))
    ],
    "minima": lambda x: [-F.max_pool1d(-x[None], 3, 1, 1), F.max_pool1d(x[None], 3, 1, 1)],
}  # fmt: skip


@pytest.mark.parametrize(("count", "size"), crossed([2, 3, 5, 8], [8, 13]))
@pytest.mark.parametrize("name", BORDERS)
def test_windows_of_one_tensor_that_fill_its_borders_with_several_values(name, size, count):
    """In one program, forward and gradient."""
    mesh = axis(count)
    x = torch.rand(3, size) + 0.5

    def computed(x):
        x = x.detach().requires_grad_()
        results = BORDERS[name](x * 1)
        total = sum((y.clamp(max=100) * (i + 1)).sum() for i, y in enumerate(results))
        return *results, *torch.autograd.grad(total, x)

    marked = spmd.mark_sharding(x.to("xla"), mesh, (None, "a"))
    for mine, right in zip(computed(marked), computed(x)):
        torch.testing.assert_close(mine.cpu(), right)


def test_a_reshape_that_also_transposes():
    """Such a reshape of jax's has the order of the dims as a parameter."""

    def function(x: jax.Array) -> list[jax.Array]:
        return [lax.reshape(x, (4, 6), dimensions=(1, 0, 2))]

    x = jnp.arange(24.0).reshape(2, 3, 4)
    splits = Splits(lambda x, num: x, 2)
    (mine,) = in_safe_forms(function, x, splits)
    np.testing.assert_array_equal(mine, function(x)[0])


def test_equations_without_a_rule_stay_as_they_are():
    def function(x: jax.Array) -> list[jax.Array]:
        return [jnp.tanh(x) @ x.T]

    assert in_safe_forms(function, jnp.ones((3, 3)), Splits(lambda x, num: x, 2)) is None


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 1, 1), (2, 4)],
        [(8, 3, 2), (4, 12)],
        [(8, 3, 2), (8, 6), (4, 12)],
        [(8, 3, 2), (4, 2, 6), (4, 12)],
        [(12, 1, 1), (12,), (3, 4)],
        exhaustive([(8, 3, 2, 1), (48,), (6, 8), (2, 24)]),
        exhaustive([(2, 4), (8, 1, 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("marked", [False, True])
def test_reshapes_to_fewer_dims_of_which_one_is_shorter(count, shapes, marked):
    """Forward and gradient. XLA's own form of such a reshape, or of all joined, crashes."""
    mesh = axis(count)
    x = torch.randn(shapes[0])

    def reshaped(x, mark):
        x = x.detach().requires_grad_()
        y = mark(x.sin())
        for shape in shapes[1:-1]:
            y = y.reshape(shape) if not marked else mark(y.reshape(shape))
        y = mark(y.reshape(shapes[-1])) ** 2
        return y, *torch.autograd.grad(y.sum(), x)

    def mark(x):
        return spmd.mark_sharding(x, mesh, ("a", *[None] * (x.ndim - 1)))

    for mine, right in zip(reshaped(x.to("xla"), mark), reshaped(x, lambda x: x)):
        torch.testing.assert_close(mine.cpu(), right)


@pytest.mark.parametrize(
    ("uneven", "size", "even"), [((), 5, 5), ((4,), 5, 8), ((4, 6), 5, 12), ((2, 8), 16, 16)]
)
def test_sizes_that_all_numbers_of_shards_divide(uneven, size, even):
    splits = Splits(lambda x, num: x, 8, uneven=frozenset(uneven))
    assert splits.even_size(size) == even


def test_a_program_that_is_made_invalid_is_compiled_with_replicated_indices(
    num_devices,
):
    if num_devices < 8:
        pytest.skip("needs a mesh of 2 by 4 devices")
    mesh = spmd.Mesh(range(8), (2, 4), ("a", "c"))
    rows = torch.arange(32.0).view(8, 4)
    table = spmd.mark_sharding(rows.to("xla"), mesh, ("c", "a"))
    ids = spmd.mark_sharding(torch.arange(7, -1, -1).to("xla"), mesh, ("a",))
    out = spmd.mark_sharding(F.embedding(ids, table), mesh, ("c", "a"))
    with pytest.warns(RuntimeWarning, match=r"(?s)made program .* invalid.*indices.*same axes"):
        result = (out * 1).cpu()
    torch.testing.assert_close(result, rows.flip(0))
    assert spmd.metrics.counter("programs_with_whole_indices") == 1


def test_a_program_that_stays_invalid_is_compiled_replicated():
    mesh = axis(5)
    x = spmd.mark_sharding(torch.arange(6.0).to("xla"), mesh, ("a",))
    halves = [spmd.mark_sharding(half, mesh, (None,)) for half in x.roll(1).roll(-1).split(3)]
    squares = [half * half for half in halves]
    with pytest.warns(RuntimeWarning, match=r"(?s)made program .* invalid.*its tensors replicated"):
        spmd.sync()
    assert [s.tolist() for s in squares] == [[0, 1, 4], [9, 16, 25]]
    assert spmd.metrics.counter("programs_with_whole_everything") == 1


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("of_result", [None, ("y", "x"), (None, "x")])
def test_a_reshape_beside_a_split_dim_of_one_element(of_result, computed):
    """Over two axes; the partitioner crashed where one of them split the dim of one element."""
    mesh = two_axes((2, 4))
    x = torch.arange(36.0).reshape(1, 1, 6, 6)
    ours = x.to("xla") * 1 if computed else x.to("xla")
    spmd.mark_sharding(ours, mesh, (None, "x", None, "y"))
    y = F.pixel_unshuffle(ours, 3)
    if of_result is not None:
        spmd.mark_sharding(y, mesh, of_result)
    torch.testing.assert_close((y * y).cpu(), F.pixel_unshuffle(x, 3).square())
    assert ours.partition_spec == (None, "x", None, "y") and torch.equal(ours.cpu(), x)


@pytest.mark.parametrize("marks", ["input", "result", "both"])
@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("count", [2, exhaustive(4), 8])
def test_a_padding_that_cuts_elements_off(count, size, marks):
    mesh = axis(count)
    x = torch.arange(1.0, size + 1)
    found, expected = [], []
    for low, high in itertools.product((-3, -1, 0, 2), repeat=2):
        if size + low + high < 1:
            continue
        ours = x.to("xla")
        if marks != "result":
            spmd.mark_sharding(ours, mesh, ("a",))
        y = F.pad(ours, (low, high), value=0.5)
        if marks != "input":
            spmd.mark_sharding(y, mesh, ("a",))
        found.append(y)
        expected.append(F.pad(x, (low, high), value=0.5))
    spmd.sync()
    for mine, right in zip(found, expected):
        torch.testing.assert_close(mine.cpu(), right)


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("low", [0, 2, 8, exhaustive(14)])
@pytest.mark.parametrize("num", [1, 2, exhaustive(5)])
@pytest.mark.parametrize("more", [0, 1, exhaustive(7)])
def test_a_padding_that_moves_few_elements_over_several_shards(count, low, num, more):
    """Alone, in front of more padding, and as the gradient of a slice."""
    mesh = axis(count)
    x, weight = torch.randn(low + num + more), torch.randn(max(17, low + num + more))
    high = len(weight) - low - num

    def padded(x, weight, mark):
        part = F.pad(x[:num].sin(), (low, high))
        leaf = weight.detach().requires_grad_()
        (leaf[low : low + num] ** 3).sum().backward()
        return mark(part) * 1, mark(leaf.grad) * 1

    mine = padded(x.to("xla"), weight.to("xla"), lambda y: spmd.mark_sharding(y, mesh, ("a",)))
    for got, right in zip(mine, padded(x, weight, lambda y: y)):
        torch.testing.assert_close(got.cpu(), right)


def test_a_padding_between_elements_of_an_empty_tensor():
    mesh = axis(2)
    x = spmd.mark_sharding(torch.randn(0, 3, 8).to("xla").requires_grad_(), mesh, (None, None, "a"))
    (grad,) = torch.autograd.grad(F.avg_pool1d(x, 2, 3).sum() + x[:, :, ::3].sum(), x)
    assert grad.shape == (0, 3, 8) and grad.cpu().numel() == 0


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("start", "step"), [(0, 2), (1, 2), (4, 3), (0, 5)])
@pytest.mark.parametrize(("size", "count"), crossed([6, 8, 12, 13], [8, 2, 4, 6]))
def test_a_padding_between_elements(count, size, start, step, reduced):
    """The gradient of a slice with a step, whole on each device, for a split tensor."""
    mesh = axis(count)
    grad = torch.arange(1.0, len(range(start, size, step)) + 1).repeat(3, 1)

    def padded(grad):
        return torch.ops.aten.slice_backward(grad, [3, size], 1, start, size, step)

    y = spmd.mark_sharding(padded(grad.to("xla")), mesh, (None, "a"))
    right = padded(grad)
    torch.testing.assert_close(
        (y.sum(1) if reduced else y + 1).cpu(), right.sum(1) if reduced else right + 1
    )


@pytest.mark.parametrize("marks", [(None, None, "x", "y"), ("x", None, ("y",))])
@pytest.mark.parametrize("stride", [2, exhaustive(3)])
def test_the_gradient_of_average_pooling_of_a_split_image(stride, marks):
    mesh = two_axes()
    x = torch.randn(4, 2, 9, 8)
    ours = spmd.mark_sharding(x.to("xla"), mesh, marks).requires_grad_()
    right = x.requires_grad_()
    (found,) = torch.autograd.grad(F.avg_pool2d(ours, 3, stride).square().sum(), ours)
    (expected,) = torch.autograd.grad(F.avg_pool2d(right, 3, stride).square().sum(), right)
    torch.testing.assert_close(found.cpu(), expected)


def two_axes(shape: tuple[int, int] = (4, 2)) -> spmd.Mesh:
    """A mesh of two axes over eight devices."""
    if spmd.global_runtime_device_count() < 8:
        pytest.skip("needs 8 devices")
    return spmd.Mesh(range(8), shape, ("x", "y"))


@pytest.mark.parametrize("shape", [(4, 2), exhaustive((2, 4))])
@pytest.mark.parametrize("size", [3, 4, exhaustive(12)])
@pytest.mark.parametrize("of_result", [("y", "x", None), ("y", None, "x"), ("x", None, None)])
def test_products_in_batches_whose_result_is_split_otherwise(of_result, size, shape):
    mesh = two_axes(shape)
    x, y = torch.randn(size, size, size), torch.randn(size, size, size)
    left, right = (spmd.mark_sharding(t.to("xla") * 1, mesh, ("x", None, "y")) for t in (x, y))
    product = spmd.mark_sharding(left @ right.mT, mesh, of_result)
    torch.testing.assert_close((product * 1).cpu(), x @ y.mT)


@pytest.mark.parametrize("shape", [(4, 2), exhaustive((2, 4))])
def test_attention_whose_heads_and_positions_change_axes(shape):
    mesh = two_axes(shape)
    x = torch.randn(1, 2, 3, 4)

    def results(x, mark=lambda t, *axes: t):
        x = x.requires_grad_()
        y = mark(x * 1, None, "x", None, "y")
        out = mark(F.scaled_dot_product_attention(y, y * 0.5, y), None, "y", "x", None)
        return out, *torch.autograd.grad((out * out).sum(), x)

    found = results(x.to("xla"), lambda t, *axes: spmd.mark_sharding(t, mesh, axes))
    for mine, right in zip(found, results(x)):
        torch.testing.assert_close(mine.cpu(), right)


@pytest.mark.parametrize("reduce", ["sum", exhaustive("prod"), "amax", exhaustive("mean")])
@pytest.mark.parametrize(
    ("operand", "updates", "index"),
    [
        ((None, "x"), ("x", "y"), None),
        ((None, ("x", "y")), ("y", "x"), None),
        ((None, ("y", "x")), ("x", "y"), None),
        (("x", None), ("y", "x"), ("y", "x")),
        (("x", "y"), ("x", "y"), ("x", "y")),
    ],
)
@pytest.mark.parametrize("sizes", [(8, 8, 8), (10, 5, 3)])
def test_a_scatter_in_batches_over_two_axes(operand, updates, index, reduce, sizes):
    batch, size, number = sizes
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, size, generator=generator) + 0.5
    source = torch.rand(batch, number, generator=generator) + 0.5
    at = torch.randint(0, size, (batch, number), generator=generator)
    tensors = [t.to("xla") for t in (x, at, source)]
    for t, spec in zip(tensors, (operand, index, updates)):
        if spec is not None:
            spmd.mark_sharding(t, two_axes(), spec)
    result = tensors[0].scatter_reduce(1, tensors[1], tensors[2], reduce)
    torch.testing.assert_close(result.cpu(), x.scatter_reduce(1, at, source, reduce))


# Function, shapes of input, weight and bias, and options; all in groups but the last one.
CONVOLUTIONS = {
    "1d": (F.conv1d, (2, 4, 8), (2, 2, 3), {"stride": 3, "padding": 1, "dilation": 2, "groups": 2}),
    "1d transposed": (
        F.conv_transpose1d,
        (2, 2, 4),
        (2, 2, 4),
        {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2, "dilation": 4},
    ),
    "2d transposed": (F.conv_transpose2d, (2, 4, 4, 4), (4, 1, 3, 3), {"groups": 4}),
    "2d, many channels": (F.conv2d, (8, 16, 6, 6), (16, 4, 3, 3), {"padding": 1, "groups": 4}),
    "3d": (F.conv3d, (9, 3, 1, 9, 9), (3, 1, 1, 3, 3), {"stride": 2, "groups": 3}),
    "3d transposed, one group": (
        F.conv_transpose3d,
        (1, 1, 4, 3, 4),
        (1, 2, 3, 4, 5),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
}


@pytest.mark.parametrize("mesh_shape", [(2, 4), exhaustive((4, 2)), (8, 1)])
@pytest.mark.parametrize("split", ["bias", "batch", "outputs", "kernel"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_groups(name, split, mesh_shape):
    function, x_shape, weight_shape, options = CONVOLUTIONS[name]
    num_out = (
        weight_shape[1] * options.get("groups", 1) if "transposed" in name else weight_shape[0]
    )
    generator = torch.Generator().manual_seed(0)
    eager = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (x_shape, weight_shape, (num_out,))
    ]
    ours = [t.to("xla") for t in eager]
    mesh, ndim = two_axes(mesh_shape), len(x_shape)
    if split == "bias":
        spmd.mark_sharding(ours[2], mesh, (("x", "y"),))
    elif split == "batch":
        spmd.mark_sharding(ours[0], mesh, ("x",) + (None,) * (ndim - 1))
    elif split == "outputs":
        spmd.mark_sharding(ours[1], mesh, ("x", "y") + (None,) * (ndim - 2))
    else:
        spmd.mark_sharding(ours[1], mesh, (None,) * (ndim - 1) + ("x",))

    def computed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        result = function(*leaves, **options)
        return [result, *torch.autograd.grad((result * result).sum(), leaves)]

    for mine, expected in zip(computed(ours), computed(eager)):
        torch.testing.assert_close(mine.detach().cpu(), expected.detach())


@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, F.conv3d])
def test_the_weight_of_a_convolution_whose_input_and_result_are_split_otherwise(function):
    mesh = two_axes()
    num_dims = int(function.__name__[4])
    x = torch.randn(2, 4, *(8,) * num_dims, dtype=torch.float64)
    weight = torch.randn(3, 4, *(2,) * num_dims, dtype=torch.float64)

    def gradient(x: torch.Tensor, weight: torch.Tensor, *, marks: bool) -> torch.Tensor:
        weight = weight.detach().requires_grad_()
        y = function(x, weight, padding=1)
        if marks:
            spmd.mark_sharding(y, mesh, ("y", *(None,) * num_dims, "x"))
        return torch.autograd.grad((y * y).sum(), weight)[0]

    ours = x.to("xla")
    spmd.mark_sharding(ours, mesh, (None, "y", *(None,) * (num_dims - 1), "x"))
    expected = gradient(x, weight, marks=False)
    torch.testing.assert_close(gradient(ours, weight.to("xla"), marks=True).cpu(), expected)


# Of (batch, height, width, channel).
SPLITS = [("x", "y"), ("y", None, "x"), (None, "x", "y"), (("x", "y"),), ("x",), (None, "y")]


@pytest.mark.parametrize("of_input", SPLITS)
@pytest.mark.parametrize(
    "of_result", [split if i < 3 else exhaustive(split) for i, split in enumerate(SPLITS)]
)
@pytest.mark.parametrize("sizes", [(2, 4, 8), exhaustive((3, 5, 2))])
def test_a_product_that_contracts_three_dims(of_input, of_result, sizes):
    mesh = two_axes((2, 4))
    x = torch.randn(*sizes, 6, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64)

    def gradient(x: torch.Tensor, weight: torch.Tensor, *, marks: bool) -> torch.Tensor:
        weight = weight.detach().requires_grad_()
        y = F.linear(x, weight)
        if marks:
            spmd.mark_sharding(y, mesh, of_result)
        return torch.autograd.grad((y * y).sum(), weight)[0]

    ours = x.to("xla")
    spmd.mark_sharding(ours, mesh, of_input)
    expected = gradient(x, weight, marks=False)
    torch.testing.assert_close(gradient(ours, weight.to("xla"), marks=True).cpu(), expected)


# Of rows and columns: the left one, the right one, and the product, which contracts the rows.
JOINED_AXES: list[tuple[tuple[Any, ...], ...]] = [
    (("z", "x"), ("z", "y"), ("z", ("x", "y"))),
    (("z", None), ("z", None), ("z", ("y", "x"))),
    (("x", "y"), ("x", ("z", "y")), ("x", ("z", "y"))),
    (("y", ("x", "z")), ("y", "z"), (("x", "z"), "y")),
]


# The left one, the right one or the result is the smallest; and sizes that do not divide.
@pytest.mark.parametrize("sizes", [(8, 16, 24), (8, 24, 16), (32, 8, 16), (9, 5, 7)])
def test_a_product_that_is_split_over_the_contracted_axis_and_two_others(sizes):
    two_axes()
    mesh = spmd.Mesh(range(8), (2, 2, 2), ("x", "y", "z"))
    rows, *columns = sizes
    left, right = (torch.randn(rows, n, dtype=torch.float64) for n in columns)

    def results(left, right, marks=None):
        of = marks or (None,) * 3

        def marked(t, spec):
            return spmd.mark_sharding(t, mesh, spec) if spec else t

        a, b = (marked((t * 1).requires_grad_(), spec) for t, spec in zip((left, right), of))
        product = marked(a.mT @ b, of[2])
        return product, *torch.autograd.grad((product * product).sum(), (a, b))

    found = [results(left.to("xla"), right.to("xla"), marks) for marks in JOINED_AXES]
    expected = results(left, right)
    for tensors in found:
        for mine, right_one in zip(tensors, expected):
            torch.testing.assert_close(mine.cpu(), right_one)


# What a weight of (24, 8) is used as, and the marks of the weight, the data and the result. The
# products that are wrong without the rule have other shapes than the weight, and other sizes.
USES_OF_A_JOINED_WEIGHT: dict[str, tuple[Any, ...]] = {
    "joined": (lambda w: torch.cat([w, w * 2]), (("z", "x"), "y"), ("z", None), ("y",)),
    "columns": (lambda w: w[:, :8] * 2, ("x", ("z", "y")), (None, "x"), ("z", ("y", "x"))),
    "sliced": (lambda w: w[:12], ("y", ("z", "x")), ("z", None), ("y",)),
    "data's gradient": (lambda w: w, ("z", ("y", "x")), ("z", None), None),
    "result": (lambda w: w, (("y", "x"), "z"), (("x", "z"), None), ("z", ("y", "x"))),
}


def test_products_with_parts_of_a_tensor_that_is_split_over_three_axes():
    two_axes()
    mesh = spmd.Mesh(range(8), (2, 2, 2), ("x", "y", "z"))
    data, weight = torch.randn(16, 8).double(), torch.randn(24, 8).double()

    def results(use, device, *marks):
        leaves = [x.to(device).clone().requires_grad_() for x in (weight, data)]
        for x, spec in zip(leaves, marks):
            spmd.mark_sharding(x, mesh, spec)
        rows = leaves[1].view(4, 4, 8)
        result = F.linear(rows, use(leaves[0]))
        if marks and marks[2]:
            spmd.mark_sharding(result, mesh, (*marks[2], *(None,) * (3 - len(marks[2]))))
        return [result.detach(), *torch.autograd.grad(result.sin().sum(), leaves)]

    found = [results(use, "xla", *marks) for use, *marks in USES_OF_A_JOINED_WEIGHT.values()]
    for (use, *_), tensors in zip(USES_OF_A_JOINED_WEIGHT.values(), found):
        for mine, right_one in zip(tensors, results(use, "cpu")):
            torch.testing.assert_close(mine.cpu(), right_one)


def test_products_are_as_they_are_where_no_tensor_is_split_over_three_axes():
    arrays = jnp.ones((8, 4)), jnp.ones((8, 4))

    def product(operands):
        return [operands[0].T @ operands[1]]

    for axis_sizes in ((8,), (4, 2), (2, 2, 2)):
        assert in_safe_forms(product, arrays, Splits(lambda x, num: x, 8, axis_sizes)) is None
    joined = Splits(lambda x, num: x, 8, (2, 2, 2), joins_axes=True)
    assert in_safe_forms(product, arrays, joined) is not None


@pytest.mark.parametrize(
    ("shape", "marks", "joins"),
    [
        ((4, 2, 1), [(("x", "y"), "z")], False),
        ((4, 1, 2), [(("x", "y"), "z")], False),
        ((2, 2, 2), [("x", "y"), ("z", None)], False),
        ((2, 2, 2), [(("x", "y", "z"), None)], False),
        ((2, 2, 2), [(("x", "y"), None), (None, "z")], False),
        ((2, 2, 2), [("z", ("y", "x")), (None, "z")], True),
    ],
)
def test_whether_one_tensor_is_split_over_three_axes_on_two_dims(shape, marks, joins):
    two_axes()
    mesh = jax.make_mesh(shape, ("x", "y", "z"), (AxisType.Auto,) * 3)
    spec = Spec.contiguous((8, 8), torch.float32)
    found = [(spec, NamedSharding(mesh, PartitionSpec(*mark))) for mark in marks]
    splits = split_dims.splits(found, lambda x, num: x, 8, replicates_indices=False)
    assert splits.joins_axes == joins


@pytest.mark.parametrize("of_left", [(None, "x", "y"), ("y", "x"), ("x", None, "y")])
@pytest.mark.parametrize("of_right", [("x", None, "y"), ("y", None, None), (None, "y", "x")])
def test_a_product_of_a_users_jax_function(of_left, of_right):
    mesh = two_axes((2, 4))
    left, right = torch.randn(2, 4, 8, 2), torch.randn(2, 4, 8, 3)
    a, b = left.to("xla"), right.to("xla")
    spmd.mark_sharding(a, mesh, of_left)
    spmd.mark_sharding(b, mesh, of_right)
    result = spmd.call_jax(
        lambda a, b: jnp.einsum("ijka,ijkb->ab", a, b, precision="highest"), a, b
    )
    expected = torch.einsum("ijka,ijkb->ab", left, right)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_the_weight_of_a_spatially_split_convolution_with_another_result():
    two_axes()
    mesh = spmd.Mesh([0, 2, 4, 6], (2, 2), ("x", "y"))
    x = torch.randn(1, 3, 3, 64, dtype=torch.float64)
    weight = torch.randn(1, 1, 1, 1, 1, dtype=torch.float64).to("xla").requires_grad_()
    ours = x.to("xla")
    spmd.mark_sharding(ours, mesh, (None, "y", None, "x"))
    y = F.conv3d(ours, weight)
    spmd.mark_sharding(y, mesh, ("y", None, "x"))
    (found,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    torch.testing.assert_close(found.cpu(), x.sum().reshape(1, 1, 1, 1, 1))


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(x, 3, stride=2, dilation=2),
    "max_pool1d padded": lambda x: F.max_pool1d(x, 3, stride=2, padding=1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, stride=2, padding=1),
    "lp_pool1d": lambda x: F.lp_pool1d(x, 2.0, 3, stride=2),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "conv1d": lambda x: F.conv1d(x, torch.ones_like(x[:, :3])[None], stride=2, dilation=2),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.ones_like(x[:, None, :3]), stride=2),
}


@pytest.mark.parametrize("size", [8, exhaustive(7), exhaustive(12)])
@pytest.mark.parametrize("count", [2, exhaustive(4)])
@pytest.mark.parametrize("marks_result", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_a_tensor_without_a_batch(name, marks_result, count, size):
    mesh = axis(count)
    x = torch.randn(2, size, dtype=torch.float64)

    def computed(x: torch.Tensor, *, marks: bool) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        if marks:
            spmd.mark_sharding(x, mesh, (None, "a"))
        y = WINDOWS[name](x)
        if marks and marks_result:
            spmd.mark_sharding(y, mesh, (None, "a"))
        return [y.detach(), *torch.autograd.grad((y * y).sum(), x)]

    for mine, expected in zip(computed(x.to("xla"), marks=True), computed(x, marks=False)):
        torch.testing.assert_close(mine.cpu(), expected)


EXTREMES: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "amax of a view": lambda x: x.t().amax(-1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of rows": lambda x: x.max(0).values,
    "aminmax": lambda x: torch.stack(x.aminmax()),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "least norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, exhaustive(torch.float64)])
@pytest.mark.parametrize("rows", [8, exhaustive(7)])
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_over_a_split_dim_keeps_nan(name, rows, dtype):
    x = torch.arange(2.0 * rows, dtype=dtype).view(rows, 2) - rows
    for position, value in [(0, -torch.inf), (2, torch.nan), (3, -0.0), (5, torch.inf)]:
        for column in (0, 1):
            y = x.clone()
            y[position, column] = value
            split = spmd.mark_sharding(y.to("xla"), axis(4), ("a", None))
            torch.testing.assert_close(
                EXTREMES[name](split).cpu(), EXTREMES[name](y), equal_nan=True
            )


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_collective_keeps_nan(op):
    mesh = axis(spmd.global_runtime_device_count())
    rows = mesh.size()
    x = torch.arange(3.0 * rows).view(rows, 3) - rows
    x[rows // 2, 1] = torch.nan
    x[0, 2] = -torch.inf
    split = spmd.mark_sharding(x.to("xla"), mesh, ("a", None))
    reduce = spmd.shard_map(
        lambda block: spmd.manual.all_reduce(block, "a", op), mesh, [("a",)], ()
    )
    right = getattr(x, f"a{op}")(0, keepdim=True)
    torch.testing.assert_close(reduce(split).cpu(), right, equal_nan=True)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_a_sum_of_exponentials_over_a_split_dim_is_nan_by_itself(name):
    x = torch.arange(16.0).view(8, 2) - 8
    x[2, 1] = torch.nan
    split = spmd.mark_sharding(x.to("xla"), axis(4), ("a", None))
    got = getattr(torch, name)(split, 0)
    assert "bitcast_convert" not in spmd.debugging.stablehlo(got)  # no detour by integers
    torch.testing.assert_close(got.cpu(), getattr(torch, name)(x, 0), equal_nan=True)


def at_every_start(function: Callable[..., Any]) -> Callable[..., Any]:
    """A jax function at starts inside and beyond both ends."""
    return lambda x, starts: tuple(function(x, starts[i]) for i in range(4))


def put_and_read(x: jax.Array, at: jax.Array) -> jax.Array:
    y = lax.dynamic_update_slice(x, x[:, :1] * 2, (0, at))
    return y + lax.dynamic_index_in_dim(y, at, 1) + lax.dynamic_slice(y, (at, 0), (4, y.shape[1]))


JAX_FUNCTIONS = {
    "as it is": at_every_start(put_and_read),
    "recomputed": at_every_start(jax.checkpoint(put_and_read)),
    "jit": at_every_start(jax.jit(put_and_read)),
    "scan": lambda x, i: lax.scan(lambda y, at: (put_and_read(y, at), y[:, at]), x, i),
    "vmap": lambda x, i: jax.vmap(put_and_read, (None, 0))(x, i),
    "rows in batches": lambda x, i: jax.vmap(lambda r, at: r.at[at].add(r[:1], mode="clip"))(
        x, i[:, None]
    ),
    "convolution": lambda x, i: lax.conv_general_dilated(
        x[None], x[:, :4, None].repeat(3, 2), (1,), "SAME", dimension_numbers=("NCH", "IOH", "NCH")
    ),
    "bits": lambda x, i: (
        lax.reduce_or(x.astype(jnp.int32), (1,)),
        lax.reduce(x, np.float64(0), lambda a, b: a + 2 * b, (0,)) * 0,
    ),
    "windows": lambda x, i: lax.reduce_window(
        lax.stop_gradient(x), np.float64(1), lambda a, b: a * b + 0 * a, (1, 3), (1, 1), "SAME"
    ),
}


@pytest.mark.parametrize(
    ("name", "marks"), crossed([*JAX_FUNCTIONS], [(None, ("x", "y")), ("y", "x")])
)
def test_users_jax_functions_on_split_dims(name, marks):
    if spmd.global_runtime_device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh, function = spmd.Mesh(range(4), (2, 2), ("x", "y")), JAX_FUNCTIONS[name]
    rows, starts = torch.linspace(-3, 3, 32, dtype=torch.float64).view(4, 8), [2, 99, -99, 0]

    def total(x: jax.Array) -> Any:
        results = jax.tree.leaves(function(x, jnp.asarray(starts)))
        return sum(jnp.sin(y).sum() for y in results), results

    with jax.enable_x64(True):
        gradient, expected = jax.jit(jax.grad(total, has_aux=True))(rows.numpy())
    leaf = rows.to("xla").requires_grad_()
    x = spmd.mark_sharding(leaf * 1, mesh, marks)
    results = jax.tree.leaves(spmd.call_jax(function, x, torch.tensor(starts).to("xla")))
    for mine, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(mine.detach().cpu().numpy(), right, rtol=1e-9, atol=1e-9)
    if results[0].requires_grad:
        sum(y.sin().sum() for y in results if y.is_floating_point()).backward()
        np.testing.assert_allclose(leaf.grad.cpu().numpy(), gradient, rtol=1e-9, atol=1e-9)


# jax sorts with indices of uint32, whose padding XLA takes for int32. Windows over several tensors
# were split in different ways. Transforms had operands in layouts that CPUs refuse. A flip in a
# small loop has a barrier, for which XLA had no code.
@pytest.mark.parametrize(
    ("function", "marks", "of_result"),
    [
        (lambda x: lax.sort(x, dimension=1), (None, None), ("a",)),
        (lambda x: jnp.median(x, axis=0), (None, "a"), (None,)),
        (lambda x: jnp.fft.rfft(x.T).real + jnp.fft.fftn(x).imag.sum(), ("a",), (None, "a")),
        (lambda x: lax.map(lambda row: row[::-1].cumsum(0), x), (None, "a"), (None, "a")),
        (lambda x: x.at[jnp.arange(3, dtype=jnp.uint8)].add(x[1:4]), ("a",), (None, "a")),
        (
            lambda x: lax.reduce_window(
                (lax.stop_gradient(x), lax.stop_gradient(-x)),
                (np.float64(0), np.float64(-np.inf)),
                lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])),
                (1, 2),
                (1, 1),
                "SAME",
            )[0],
            (None, "a"),
            ("a",),
        ),
    ],
)
def test_users_jax_functions_on_dims_that_are_split_unevenly(function, marks, of_result):
    mesh, x = axis(4), torch.linspace(-3, 3, 35, dtype=torch.float64).view(5, 7).roll(2, 1)

    def total(x: jax.Array) -> Any:
        result = function(x)
        return jnp.sin(result).sum(), result

    with jax.enable_x64(True):
        gradient, expected = jax.jit(jax.grad(total, has_aux=True))(x.numpy())
    leaf = x.to("xla").requires_grad_()
    result = spmd.call_jax(function, spmd.mark_sharding(leaf * 1, mesh, marks)) * 1
    spmd.mark_sharding(result, mesh, of_result)
    np.testing.assert_allclose(result.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-9)
    result.sin().sum().backward()
    np.testing.assert_allclose(leaf.grad.cpu().numpy(), gradient, rtol=1e-9, atol=1e-9)
