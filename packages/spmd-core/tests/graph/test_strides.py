"""Overlap and density of strides, against torch's own, and strides in another tensor's order."""

import pytest
import torch

from spmd_core.graph.strides import dense_strides, is_dense, overlaps

LAYOUTS = {
    "contiguous": torch.empty(2, 3, 4),
    "transposed": torch.empty(4, 3, 2).permute(2, 1, 0),
    "permuted": torch.empty(3, 2, 4).permute(1, 2, 0),
    "channels last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last of one channel": torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "one row": torch.empty(1, 4, 3).transpose(1, 2),
    "scalar": torch.empty(()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_strides_are_those_of_a_tensor_like_it(name: str) -> None:
    like = LAYOUTS[name]
    assert is_dense(tuple(like.shape), like.stride())
    for shape in (tuple(like.shape), tuple(n + 5 if n > 1 else n for n in like.shape)):
        got = dense_strides(shape, tuple(like.shape), like.stride())
        assert is_dense(shape, got)
        order = [d for _, d in sorted((s, d) for d, s in enumerate(like.stride()) if shape[d] > 1)]
        assert [d for _, d in sorted((s, d) for d, s in enumerate(got) if shape[d] > 1)] == order
    assert dense_strides(tuple(like.shape), tuple(like.shape), like.stride()) == like.stride()


def test_dense_strides_close_gaps_and_keep_repetitions() -> None:
    sliced = torch.empty(4, 6)[::2, ::3]
    assert dense_strides((2, 2), (2, 2), sliced.stride()) == (2, 1)
    repeated = torch.empty(3, 1).expand(3, 4)
    assert dense_strides((7, 9), (3, 4), repeated.stride()) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (0, 1), True),
        ((1, 3), (0, 1), False),
        ((4, 3), (1, 1), True),
        ((2, 3), (3, 2), False),
        ((0, 3), (1, 0), False),
    ],
)
def test_elements_that_share_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    assert overlaps(shape, strides) is expected
