"""Matrix products against eager torch on the CPU."""

import functools
import math
from typing import Any

import pytest
import torch
from tiers import by_tier, crossed

import oracle
import spmd_core as spmd
from oracle import check, lower
from spmd_core.ops import matmul, registry  # noqa: F401  (registers the lowerings)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype) -> None:
    check("aten.mm.default", values(dtype, 3, 4), values(dtype, 4, 5, seed=1))
    check("aten.mm.default", values(dtype, 3, 0), values(dtype, 0, 5))
    check("aten.bmm.default", values(dtype, 2, 3, 4), values(dtype, 2, 4, 5, seed=1))
    check("aten.mv.default", values(dtype, 3, 4), values(dtype, 4, seed=1))
    check("aten.dot.default", values(dtype, 4), values(dtype, 4, seed=1))
    check("aten.vdot.default", values(dtype, 4), values(dtype, 4, seed=1))


def test_sixteen_bits_accumulate_in_float32() -> None:
    ones = torch.ones(1, 3000, dtype=torch.bfloat16)
    check("aten.mm.default", ones, ones.t(), rtol=0, atol=0)


def test_integers_are_exact_beyond_what_a_float_holds() -> None:
    x = torch.full((2, 2), 2**31 + 1)
    check("aten.mm.default", x, x)
    check(
        "aten._int_mm.default",
        torch.full((32, 16), 100, dtype=torch.int8),
        torch.full((16, 8), 100, dtype=torch.int8),
    )


def test_complex_products() -> None:
    z = torch.complex(values(torch.float32, 3, 3), values(torch.float32, 3, 3, seed=1))
    check("aten.mm.default", z, z)
    check("aten.vdot.default", z[0], z[1])
    check("aten.dot.default", z[0], z[1])


SCALES = [{}, {"beta": 2, "alpha": 3}, {"beta": 0}, {"alpha": 0}]


@pytest.mark.parametrize(("dtype", "scales"), crossed([*DTYPES], [*SCALES]))
def test_sums_with_a_product(scales: dict[str, int], dtype: torch.dtype) -> None:
    # torch's CPU kernels round some 16-bit terms before they add them. The tolerance is half a unit
    # in the last place of the largest term, 64 or more.
    loose = {torch.bfloat16: 0.5, torch.float16: 0.13}.get(dtype)
    check = functools.partial(oracle.check, atol=loose, rtol=None if loose is None else 0)
    a, b = values(dtype, 3, 4, seed=1), values(dtype, 4, 5, seed=2)
    batch_a, batch_b = values(dtype, 2, 3, 4, seed=1), values(dtype, 2, 4, 5, seed=2)
    for shape in ((3, 5), (5,), (3, 1), ()) if dtype is torch.float32 else ((5,),):
        check("aten.addmm.default", values(dtype, *shape), a, b, **scales)
    for shape in ((2, 3, 5), (3, 5), (1, 1, 5)) if dtype is torch.float32 else ((1, 1, 5),):
        check("aten.baddbmm.default", values(dtype, *shape), batch_a, batch_b, **scales)
    check("aten.addbmm.default", values(dtype, 3, 5), batch_a, batch_b, **scales)
    check("aten.addmv.default", values(dtype, 3), a, b[:, 0], **scales)
    check("aten.addr.default", values(dtype, 4), a[:, 0], b[:, 0], **scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_scales(dtype: torch.dtype) -> None:
    check(
        "aten.addmm.default",
        values(dtype, 5),
        values(dtype, 3, 4),
        values(dtype, 4, 5),
        beta=0.5,
        alpha=-0.3,
    )


def test_sixteen_bits_into_float32() -> None:
    # torch has these overloads on GPUs only; converting the inputs first gives the same values.
    a, b = values(torch.bfloat16, 2, 3, 4), values(torch.bfloat16, 2, 4, 5, seed=1)
    x, product = values(torch.bfloat16, 2, 3, 5, seed=2), a.float() @ b.float()
    for name, args, right in (
        ("mm", (a[0], b[0]), product[0]),
        ("bmm", (a, b), product),
        ("addmm", (x[0], a[0], b[0]), x[0] + product[0]),
        ("baddbmm", (x, a, b), x + product),
    ):
        (got,) = lower(
            f"aten.{name}.dtype",
            (*args, torch.float32),
            {},
            (registry.Out(tuple(right.shape), torch.float32),),
        )
        torch.testing.assert_close(torch.tensor(got.tolist()), right)


def test_beta_of_zero_ignores_nan() -> None:
    nan = torch.full((3, 5), math.nan)
    check(
        "aten.addmm.default", nan, values(torch.float32, 3, 4), values(torch.float32, 4, 5), beta=0
    )
    check(
        "aten.baddbmm.default",
        nan.expand(2, 3, 5),
        values(torch.float32, 2, 3, 4),
        values(torch.float32, 2, 4, 5),
        beta=0.0,
    )
    check(
        "aten.addmm.default", nan, values(torch.float32, 3, 0), values(torch.float32, 0, 5), beta=0
    )


def test_addr_of_booleans() -> None:
    a, b = torch.tensor([True, False]), torch.tensor([True, True, False])
    check("aten.addr.default", torch.zeros(2, 3, dtype=torch.bool), a, b)


@pytest.mark.parametrize("use_gelu", [False, True])
def test_addmm_with_activation(use_gelu: bool) -> None:
    x, a, b = values(torch.float32, 5), values(torch.float32, 3, 4), values(torch.float32, 4, 5)
    check("aten._addmm_activation.default", x, a, b, use_gelu=use_gelu, atol=1e-2)


def test_the_gradients_of_a_layer() -> None:
    found = []
    for device in ("cpu", "xla"):
        x, weight, bias, grad = (
            values(torch.float32, *shape).to(device)
            for shape in [(2, 3, 4), (5, 4), (5,), (2, 3, 5)]
        )
        leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
        gradients = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, grad)
        found.append([gradient.cpu() for gradient in gradients])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_trilinear() -> None:
    # The calls that torch.nn.Bilinear makes, forward and backward.
    a, weight, c = (
        values(torch.float32, 5, 2),
        values(torch.float32, 4, 2, 3),
        values(torch.float32, 5, 3),
    )
    grad = values(torch.float32, 5, 4)
    check("aten._trilinear.default", a, weight, c, [1, 3], [0], [1, 2], [2, 3])
    check("aten._trilinear.default", grad, weight, c, [2, 3], [0], [1, 2], [1, 3])
    check("aten._trilinear.default", a, grad, c, [1, 3], [2, 3], [1, 2], [0])
    check("aten._trilinear.default", a, weight, grad, [1, 3], [0], [2, 3], [1, 2])


OFFSETS = torch.tensor([2, 2, 8], dtype=torch.int32)
GROUPED = [((8, 8), (3, 8, 16)), ((8, 8), (8, 16)), ((3, 8, 8), (8, 8)), ((3, 8, 8), (3, 8, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a", "b"), GROUPED)
def test_grouped_products(a, b, dtype):
    check(
        "aten._grouped_mm.default",
        values(dtype, *a),
        values(dtype, *b, seed=1),
        OFFSETS if len(a) + len(b) < 6 else None,
    )


@pytest.mark.parametrize(("a", "b"), GROUPED[:2])
def test_grouped_products_and_their_gradients_on_the_device(a, b):
    results = []
    for device in ("cpu", "xla"):
        x, y = (
            values(torch.float32, *shape, seed=seed).to(device).requires_grad_()
            for seed, shape in enumerate((a, b))
        )
        out = torch.nn.functional.grouped_mm(x, y, offs=OFFSETS.to(device))
        out.square().sum().backward()
        results.append([t.detach().cpu() for t in (out, x.grad, y.grad)])
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-4)


def grouped_layouts(num_devices: int) -> list[tuple[Any, ...]]:
    """Marks of the rows and of the matrices, on meshes of one axis and of two."""
    found: list[tuple[Any, ...]] = [(None, None, None)]
    axis = spmd.Mesh(range(num_devices), (num_devices,), ("a",))
    found += [(axis, ("a",), None), (axis, (None, "a"), None), (axis, None, ("a",))]
    if num_devices >= 4:
        axes = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("a", "b"))
        found += [(axes, ("a",), ("b", None, "a")), (axes, ("b", "a"), (("a", "b"),))]
    return found


@pytest.mark.parametrize(("rows", "more"), crossed([4, 72, 332], [3, 8]))
def test_many_groups_are_multiplied_in_blocks(rows, more, num_devices):
    # More groups than twice the devices: empty ones, long ones, and rows behind the last.
    groups = 2 * num_devices + more
    ends = torch.randint(0, rows + 1, (groups,), generator=torch.Generator().manual_seed(rows))
    ends = ends.sort()[0].to(torch.int32)
    ends[-3:] = ends[-3]
    last = int(ends[-1])
    x, y = values(torch.float32, rows, 8) / 4, values(torch.float32, groups, 8, 12, seed=1) / 4
    results = []
    found = grouped_layouts(num_devices)
    # Each number of rows has every third layout, as each is a program.
    found = by_tier(found[(4, 72, 332).index(rows) :: 3], in_all=found)
    layouts = [("cpu", None), *(("xla", *layout) for layout in found)]
    for device, mesh, *specs in layouts:
        a, b = (t.clone().to(device).requires_grad_() for t in (x, y))
        for tensor, spec in zip((a, b), specs):
            if spec is not None:
                spmd.mark_sharding(tensor, mesh, spec)
        out = torch.nn.functional.grouped_mm(a, b, offs=ends.to(device))
        out[:last].sin().sum().backward()
        columns = torch.ops.aten._grouped_mm(b.detach().mT, a.detach().mT, ends.to(device))
        results.append(
            [t.detach().cpu() for t in (out[:last], a.grad[:last], b.grad, columns[:, :last])]
        )
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2e-5, atol=1e-4)


def test_rows_after_the_last_group_are_zero():
    x, y = values(torch.float32, 8, 4).to("xla"), values(torch.float32, 3, 4, 8).to("xla")
    assert torch.ops.aten._grouped_mm(x, y, OFFSETS.to("xla") // 2)[4:].count_nonzero().item() == 0


def test_operands_of_a_grouped_product_must_fit():
    x, y = values(torch.float32, 8, 4), values(torch.float32, 3, 5, 8)
    for device in ("cpu", "xla"):
        with pytest.raises(
            RuntimeError, match="contraction dimension of mat_a and mat_b must match"
        ):
            torch.ops.aten._grouped_mm(x.to(device), y.to(device), OFFSETS.to(device))
        torch.ops.aten._grouped_mm(x.to(device), y[:, :4].to(device), OFFSETS.to(device))


@pytest.mark.parametrize("rows", [512, 1024])
def test_the_gradient_of_a_tall_weight(rows: int) -> None:
    """CPUs compute the transpose of a product whose result has many more rows than columns."""
    torch.manual_seed(0)
    x, grad, weight = torch.randn(2, 512, 16), torch.randn(2, 512, rows), torch.randn(rows, 16)
    (got,) = torch.autograd.grad(
        torch.nn.functional.linear(x.to("xla"), w := weight.to("xla").requires_grad_()),
        [w],
        grad.to("xla"),
    )
    torch.testing.assert_close(
        got.cpu(), grad.flatten(0, 1).T @ x.flatten(0, 1), rtol=1e-5, atol=1e-3
    )
