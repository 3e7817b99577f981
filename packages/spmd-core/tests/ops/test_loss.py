"""Losses against eager torch on the CPU."""

import pytest
import torch
from tiers import crossed

from oracle import check
from spmd_core.ops import loss  # noqa: F401  (registers the lowerings)

FLOATS = [torch.float32, torch.bfloat16]
REDUCTIONS = [0, 1, 2]  # none, mean, sum


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(dtype: torch.dtype, reduction: int, *shape: int) -> torch.Tensor:
    return values(dtype, *(shape if reduction == 0 else ()), seed=7)


@pytest.mark.parametrize(
    ("dtype", "reduction", "op"),
    crossed(
        [*FLOATS], [*REDUCTIONS], ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"]
    ),
)
def test_pointwise_losses(op: str, reduction: int, dtype: torch.dtype) -> None:
    x, y = values(dtype, 4, 5), values(dtype, 4, 5, seed=1)
    extra = {"smooth_l1_loss": (0.7,), "huber_loss": (0.7,)}.get(op, ())
    check(f"aten.{op}.default", x, y, reduction)
    check(f"aten.{op}.default", x, y, reduction, *extra)
    check(
        f"aten.{op}_backward.default",
        gradient(dtype, reduction, 4, 5),
        x,
        y,
        reduction,
        *(extra or ()),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smooth_l1_with_beta_zero_is_l1(reduction: int) -> None:
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, -3.0])
    check("aten.smooth_l1_loss.default", x, y, reduction, 0.0)
    check(
        "aten.smooth_l1_loss_backward.default",
        gradient(torch.float32, reduction, 3),
        x + 0.5,
        y,
        reduction,
        0.0,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_nothing(reduction: int) -> None:
    check("aten.mse_loss.default", torch.empty(0, 3), torch.empty(0, 3), reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_cross_entropy(reduction: int, dtype: torch.dtype) -> None:
    x, y = values(dtype, 4, 5).sigmoid(), values(dtype, 4, 5, seed=1).sigmoid()
    for weight in (None, values(dtype, 5, seed=2).abs()):
        check("aten.binary_cross_entropy.default", x, y, weight, reduction)
        check(
            "aten.binary_cross_entropy_backward.default",
            gradient(dtype, reduction, 4, 5),
            x,
            y,
            weight,
            reduction,
        )
        for pos_weight in (None, values(dtype, 5, seed=3).abs()):
            check(
                "aten.binary_cross_entropy_with_logits.default",
                values(dtype, 4, 5) * 5,
                y,
                weight,
                pos_weight,
                reduction,
            )


def test_certain_and_wrong_predictions_cost_a_hundred() -> None:
    check(
        "aten.binary_cross_entropy.default",
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([1.0, 0.0, 0.0]),
        None,
        0,
    )
    check(
        "aten.binary_cross_entropy_backward.default",
        torch.ones(3),
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([1.0, 0.0, 0.0]),
        None,
        0,
    )


@pytest.mark.parametrize(
    ("weighted", "dtype", "reduction"), crossed([False, True], [*FLOATS], [*REDUCTIONS])
)
def test_nll_loss(reduction: int, dtype: torch.dtype, weighted: bool) -> None:
    weight = values(dtype, 6, seed=3).abs() if weighted else None
    target = torch.tensor([0, 5, -100, 3])
    x = values(dtype, 4, 6).log_softmax(1)
    check("aten.nll_loss_forward.default", x, target, weight, reduction, -100)
    check("aten.nll_loss_forward.default", x, torch.tensor([0, 5, 2, 2]), weight, reduction, 2)
    total = torch.ops.aten.nll_loss_forward(x, target, weight, reduction, -100)[1]
    check(
        "aten.nll_loss_backward.default",
        gradient(dtype, reduction, 4),
        x,
        target,
        weight,
        reduction,
        -100,
        total,
    )
    check("aten.nll_loss_forward.default", x[0], torch.tensor(3), weight, reduction, -100)
    total = torch.ops.aten.nll_loss_forward(x[0], torch.tensor(3), weight, reduction, -100)[1]
    check(
        "aten.nll_loss_backward.default",
        values(dtype),
        x[0],
        torch.tensor(3),
        weight,
        reduction,
        -100,
        total,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_of_images(reduction: int, weighted: bool) -> None:
    weight = values(torch.float32, 6, seed=3).abs() if weighted else None
    x, target = (
        values(torch.float32, 2, 6, 3, 2).log_softmax(1),
        torch.tensor([[[0, 1], [2, 3], [4, 5]], [[5, 5], [1, -100], [0, 0]]]),
    )
    check("aten.nll_loss2d_forward.default", x, target, weight, reduction, -100)
    total = torch.ops.aten.nll_loss2d_forward(x, target, weight, reduction, -100)[1]
    check(
        "aten.nll_loss2d_backward.default",
        gradient(torch.float32, reduction, 2, 3, 2),
        x,
        target,
        weight,
        reduction,
        -100,
        total,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_of_ignored_targets_only(reduction: int) -> None:
    x, target = torch.full((2, 3), -torch.inf), torch.tensor([-100, -100])
    check("aten.nll_loss_forward.default", x, target, None, reduction, -100)
    check(
        "aten.nll_loss_backward.default",
        gradient(torch.float32, reduction, 2),
        x,
        target,
        None,
        reduction,
        -100,
        torch.tensor(0.0),
    )
    check(
        "aten.nll_loss_forward.default",
        torch.empty(0, 3),
        torch.empty(0, dtype=torch.int64),
        None,
        reduction,
        -100,
    )


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin(p, reduction):
    target = torch.tensor([1, 0, 3])
    for weight in (None, torch.rand(4, dtype=torch.float64)):
        for x, y in (
            (torch.randn(3, 4, dtype=torch.float64), target),
            (torch.randn(4, dtype=torch.float64), target[0]),
        ):
            check("aten.multi_margin_loss.default", x, y, p, 0.7, weight, reduction)
            grad = torch.rand(3 if x.dim() == 2 and reduction == 0 else (), dtype=torch.float64)
            check("aten.multi_margin_loss_backward.default", grad, x, y, p, 0.7, weight, reduction)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_multilabel_margin(reduction):
    # A list that ends early, an empty one, one with a repeated label, and one without an end mark.
    target = torch.tensor([[3, 0, -1, 1], [-1, 1, 0, 0], [2, 2, -1, -1], [0, 1, 2, 3]])
    for x, y in (
        (torch.randn(4, 4, dtype=torch.float64), target),
        (torch.randn(4, dtype=torch.float64), target[0]),
    ):
        check("aten.multilabel_margin_loss_forward.default", x, y, reduction)
        grad = torch.rand(4 if x.dim() == 2 and reduction == 0 else (), dtype=torch.float64)
        present = torch.ops.aten.multilabel_margin_loss_forward(x, y, reduction)[1]
        check("aten.multilabel_margin_loss_backward.default", grad, x, y, reduction, present)
