"""What is kept is what transformers' warpers keep; draws follow the probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import spmd_core as spmd
from examples.llama_serving.sampling import NOT_FINITE, SamplingOptions, kept_logits, next_tokens

OPTIONS = [
    SamplingOptions(1.0),
    SamplingOptions(0.3, top_k=1),
    SamplingOptions(2.0, top_k=7),
    SamplingOptions(1.0, top_k=10**9),
    SamplingOptions(1.0, top_p=0.5),
    SamplingOptions(0.7, top_p=1e-6),
    SamplingOptions(1.3, top_k=20, top_p=0.9),
    SamplingOptions(0.5, top_k=3, top_p=0.999),
]


def column(name: str, options: list[SamplingOptions], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(o, name) for o in options], dtype=dtype).to("xla")


def choose(logits_SV: torch.Tensor, options: list[SamplingOptions], position: int) -> list[int]:
    found: list[int] = next_tokens(
        logits_SV.to("xla"),
        column("temperature", options, torch.float32),
        column("top_k", options, torch.int64),
        column("top_p", options, torch.float32),
        column("seed", options, torch.int64),
        torch.full((len(options),), position).to("xla"),
    ).tolist()
    return found


@pytest.mark.one_device
@pytest.mark.parametrize("vocab", [2, 50, 1000])
def test_what_is_kept_is_what_transformers_keeps(vocab: int) -> None:
    logits_SV = torch.randn(len(OPTIONS), vocab) * 3
    wanted = []
    for row_V, o in zip(logits_SV, OPTIONS):
        row_1V = TemperatureLogitsWarper(o.temperature)(None, row_V[None])
        if o.top_k:
            row_1V = TopKLogitsWarper(o.top_k)(None, row_1V)
        if o.top_p < 1:
            row_1V = TopPLogitsWarper(o.top_p)(None, row_1V)
        wanted.append(row_1V[0])
    scaled_SV = logits_SV / torch.tensor([[o.temperature] for o in OPTIONS])
    found: Any = spmd.call_jax(
        kept_logits,
        scaled_SV.to("xla"),
        column("top_k", OPTIONS, torch.int64),
        column("top_p", OPTIONS, torch.float32),
    )
    assert torch.equal(found.cpu().isfinite(), torch.stack(wanted).isfinite())
    torch.testing.assert_close(found.cpu(), torch.stack(wanted))


def test_equal_logits_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    found: Any = spmd.call_jax(
        kept_logits, logits.to("xla"), torch.tensor([2]).to("xla"), torch.tensor([0.4]).to("xla")
    )
    assert found.isfinite().tolist() == [[False, True, True, True, False]]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num = 4000
    options = [SamplingOptions(1.0, seed=seed) for seed in range(num)]
    tokens = choose(probabilities.log().expand(num, 4), options, 5)
    found = np.bincount(tokens, minlength=4) / num
    for share, p in zip(found, probabilities.tolist()):
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / num)


@pytest.mark.one_device
def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits_SV = torch.randn(1, 1000).expand(3, 1000)
    options = [SamplingOptions(1.0, seed=seed) for seed in (7, 7, 2**63 - 1)]
    first, second, other = choose(logits_SV, options, 3)
    assert first == second != other
    assert choose(logits_SV[:1], options[:1], 3) == [first]
    assert choose(logits_SV[:1], options[:1], 4) != [first]
    beside = [SamplingOptions(), options[0], SamplingOptions(0.5, top_k=2, seed=7)]
    assert choose(logits_SV, beside, 3)[1] == first
    high = [SamplingOptions(1.0, seed=2**32 + 7)]
    assert choose(logits_SV[:1], high, 3) != [first]


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits_SV = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 4.0]])
    assert choose(logits_SV, [SamplingOptions()] * 2, 0) == [1, 0]
    assert choose(logits_SV, [SamplingOptions(), SamplingOptions(1e-4)], 0) == [1, 0]
    assert choose(logits_SV.to(torch.bfloat16), [SamplingOptions()] * 2, 0) == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    logits_SV = torch.tensor([[0.0, 1.0], [bad, 1.0]])
    assert choose(logits_SV, [SamplingOptions()] * 2, 0) == [1, NOT_FINITE]
