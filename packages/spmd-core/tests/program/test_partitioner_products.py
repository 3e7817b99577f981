"""Products and convolutions that XLA's partitioner gets wrong without the rules, against torch."""

from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from meshes import two_axes
from tiers import crossed, exhaustive

import spmd_core as spmd
from spmd_core.program.safe_forms import in_safe_forms
from spmd_core.program.splits import Splits

# Of rows and columns: the left one, the right one, and the product, which contracts the rows.
JOINED_AXES: list[tuple[tuple[Any, ...], ...]] = [
    (("z", "x"), ("z", "y"), ("z", ("x", "y"))),
    (("z", None), ("z", None), ("z", ("y", "x"))),
    (("x", "y"), ("x", ("z", "y")), ("x", ("z", "y"))),
    (("y", ("x", "z")), ("y", "z"), (("x", "z"), "y")),
]

# What a weight of (24, 8) is used as, and the marks of the weight, the data and the result. The
# products that are wrong without the rule have other shapes than the weight, and other sizes.
USES_OF_A_JOINED_WEIGHT: dict[str, tuple[Any, ...]] = {
    "joined": (lambda w: torch.cat([w, w * 2]), (("z", "x"), "y"), ("z", None), ("y",)),
    "columns": (lambda w: w[:, :8] * 2, ("x", ("z", "y")), (None, "x"), ("z", ("y", "x"))),
    "sliced": (lambda w: w[:12], ("y", ("z", "x")), ("z", None), ("y",)),
    "data's gradient": (lambda w: w, ("z", ("y", "x")), ("z", None), None),
    "result": (lambda w: w, (("y", "x"), "z"), (("x", "z"), None), ("z", ("y", "x"))),
}


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


@pytest.mark.parametrize(
    ("name", "split", "mesh_shape"),
    crossed(
        [*CONVOLUTIONS],
        ["bias", "batch", "outputs", "kernel"],
        [(2, 4), (8, 1), (4, 2)],
        rounds=4,
    ),
    ids=str,
)
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
