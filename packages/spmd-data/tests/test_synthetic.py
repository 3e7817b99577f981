"""Tests the made-up samples: their values, and that a batch takes its time."""

import time

import pytest
import torch
from torch.utils.data import DataLoader

from spmd_data.synthetic import SyntheticImages, SyntheticTokens


def test_tokens() -> None:
    tokens = SyntheticTokens(100, seq=64, vocab_size=50, seed=1)
    batch = next(iter(DataLoader(tokens, batch_size=8)))
    assert batch["input_ids"].shape == batch["targets"].shape == (8, 64)
    assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() == 49
    assert torch.equal(tokens[3]["input_ids"], batch["input_ids"][3])
    assert len({tuple(tokens[i]["input_ids"].tolist()) for i in range(100)}) == 100
    other = SyntheticTokens(100, seq=64, vocab_size=50, seed=2)
    assert not torch.equal(other[3]["input_ids"], tokens[3]["input_ids"])


def test_images() -> None:
    images = SyntheticImages(40, size=16, num_classes=10)
    batch = next(iter(DataLoader(images, batch_size=20)))
    assert batch["pixels"].shape == (20, 3, 16, 16)
    assert batch["pixels"].dtype == torch.uint8
    assert abs(batch["pixels"].float().mean() - 127.5) < 5
    assert batch["label"].tolist() == [*range(10), *range(10)]
    assert images[-1]["label"] == 9
    with pytest.raises(IndexError, match="out of range for 40 samples"):
        images[40]


def test_a_batch_takes_its_time() -> None:
    """At least; how much more depends on the machine."""
    loader = DataLoader(
        SyntheticTokens(64, seq=8, vocab_size=5, seconds_per_batch=0.02), batch_size=16
    )
    start = time.perf_counter()
    assert len(list(loader)) == 4
    assert time.perf_counter() - start >= 0.08
