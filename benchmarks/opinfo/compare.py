"""Compares results with eager torch's: equal shapes and dtypes, values within tolerances.

Some functions recognise results that may differ for a reason, such as another choice among equals.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.opinfo.samples import Sample, moved


def leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def down(tree: Any) -> list[Any]:
    return [x.detach().cpu() if isinstance(x, torch.Tensor) else x for x in leaves(tree)]


def skeleton(got: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """How the results differ in number, Python type, shape or dtype, or None."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for mine, right in zip(got, expected):
        if isinstance(right, torch.Tensor) != isinstance(mine, torch.Tensor):
            return f"{type(mine).__name__} instead of {type(right).__name__}"
        if isinstance(right, torch.Tensor) and (
            mine.shape != right.shape or mine.dtype != right.dtype
        ):
            return f"{mine.dtype}{list(mine.shape)} instead of {right.dtype}{list(right.shape)}"
    return None


def close(got: Sequence[Any], expected: Sequence[Any], **tolerance: Any) -> str | None:
    """How the values differ beyond the tolerance (default: the dtype's), or None."""
    for mine, right in zip(got, expected):
        try:
            if isinstance(right, torch.Tensor):
                torch.testing.assert_close(
                    mine.resolve_conj().resolve_neg(),
                    right.resolve_conj().resolve_neg(),
                    equal_nan=True,
                    **tolerance,
                )
            elif isinstance(right, (bool, int, float, complex)):
                torch.testing.assert_close(mine, right, equal_nan=True, **tolerance)
            elif mine != right and not isinstance(right, torch.device):
                return f"{mine!r} instead of {right!r}"
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join(lines[:4])
    return None


def deviation(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference: absolute where the expected number is below 1, relative above."""
    worst = 0.0
    for mine, right in zip(got, expected):
        if (
            isinstance(right, torch.Tensor)
            and right.numel()
            and (right.is_floating_point() or right.is_complex())
        ):
            wide = torch.complex128 if right.is_complex() else torch.float64
            a, b = mine.to(wide), right.to(wide)
            error = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(math.inf, math.inf)
            error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, error)
            worst = max(worst, error.max().item())
    return worst


def as_good_as_eager(
    run: Callable[[Sample], Any], sample: Sample, got: Sequence[Any], expected: Sequence[Any]
) -> bool:
    """Whether each result's error against float64 is at most twice eager torch's own error.

    Both errors are those of results in the sample's dtype against eager torch in float64.
    """
    try:
        truth = down(run(moved(sample, "cpu", dtype=torch.float64)))
    except Exception:  # no float64 form to compare with: the caller reports the difference
        return False
    if len(truth) != len(got) or any(
        isinstance(t, torch.Tensor) and t.shape != e.shape for t, e in zip(truth, expected)
    ):
        return False
    for mine, right, true in zip(got, expected, truth):
        if not isinstance(right, torch.Tensor) or not (
            right.is_floating_point() or right.is_complex()
        ):
            if close([mine], [right]) is not None and (
                not isinstance(true, torch.Tensor) or not torch.equal(mine, true.to(mine.dtype))
            ):
                return False
            continue
        rounded = true.to(right.dtype)
        if close([mine], [rounded]) is None:
            continue
        if not torch.equal(mine.isfinite(), rounded.isfinite()) and not torch.equal(
            mine.isfinite(), right.isfinite()
        ):
            return False
        if deviation([mine], [rounded]) > 2 * deviation([right], [rounded]):
            return False
    return True


def other_choice_of_equals(sample: Sample, got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether the results are other positions of the same values.

    Among equal elements, `topk`, `mode` and an unstable sort may return the position of any.
    """
    x = sample.input
    if (
        not isinstance(x, torch.Tensor)
        or not got
        or not all(isinstance(t, torch.Tensor) for t in got)
        or got[-1].dtype is not torch.int64
    ):
        return False
    x, mine, right = x.detach(), got[-1], expected[-1]
    if len(got) == 2 and close(got[:1], expected[:1]) is not None:
        return False
    for dim in range(x.dim()):
        as_many = [t if t.dim() == x.dim() else t.unsqueeze(dim) for t in (mine, right)]
        fits = (
            all(d == dim or n <= m for d, (n, m) in enumerate(zip(as_many[0].shape, x.shape)))
            and as_many[0].dim() == x.dim()
        )
        if fits and all(
            t.numel() == 0 or (t.min() >= 0 and t.max() < x.shape[dim]) for t in as_many
        ):
            chosen = [torch.gather(x, dim, t) for t in as_many]
            if close(chosen[:1], chosen[1:]) is None:
                return True
    return False


def same_for_equals(sample: Sample, got: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether gradients differ only in which of several equal elements receives them.

    Then their sums over equal elements are the same.
    """
    wanted = [t for t in sample.tensors() if t.requires_grad]
    if len(wanted) != len(got) or any(t.is_complex() for t in wanted):
        return False
    for x, mine, right in zip(wanted, got, expected):
        values, group = torch.unique(x.detach(), return_inverse=True)
        sums = [
            torch.zeros(len(values), dtype=torch.float64).index_add(
                0, group.flatten(), g.double().flatten()
            )
            for g in (mine, right)
        ]
        if close([sums[0].to(x.dtype)], [sums[1].to(x.dtype)]) is not None:
            return False
    return True
