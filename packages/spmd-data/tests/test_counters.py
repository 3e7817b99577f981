"""Tests the sums, means and the report: what is the bottleneck, and which stage."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spmd_data import MpDeviceLoader
from spmd_data.counters import Counters, means, report

SUMS = Counters(
    batches=11, bytes=22_000_000, read_s=1.1, transfer_s=0.11, first_wait_s=0.2, wait_s=0.6,
    step_s=0.4, ready=5, requests=10,
).values()  # fmt: skip


def test_means_are_those_since_the_last_ones() -> None:
    mean = means(SUMS)
    assert {name: round(value, 6) for name, value in mean.items()} == {
        "read_ms": 100.0,
        "transfer_ms": 10.0,
        "wait_ms": 60.0,
        "step_ms": round(400 / 11, 6),
        "wait_share": 0.6,
        "queue_depth": 0.5,
        "megabytes": 2.0,
    }
    later = {name: 3 * value for name, value in SUMS.items()}
    assert means(later, SUMS) == pytest.approx(mean)
    assert set(means(SUMS, SUMS).values()) == {0.0}


@pytest.mark.parametrize(
    ("changes", "options", "verdict"),
    [
        (
            {},
            {},
            r"The input is the bottleneck: the loop waited 60\.0%\. Its slowest stage is reading, "
            r"with 100\.00 ms per batch beside 36\.36 ms of the loop's work\. "
            r"Give the DataLoader more workers",
        ),
        ({"transfer_s": 4.4}, {"transfer_threads": 2}, r"slowest stage is transfer, with 200\.00"),
        ({"read_s": 0.2}, {}, r"slowest stage is reading, .*Its time varies: pass a larger"),
        ({}, {"prefetch": 0}, r"With prefetch=0 nothing is done ahead: pass prefetch=2"),
        ({"wait_s": 0.01}, {}, r"The input is not the bottleneck: the loop waited 2\.4%\."),
        ({"requests": 1}, {}, r"Too few batches to tell"),
    ],
)
def test_the_report_names_the_bottleneck(
    changes: dict[str, Any], options: dict[str, int], verdict: str
) -> None:
    text = report({**SUMS, **changes}, **({"prefetch": 2, "transfer_threads": 1} | options))
    *table, said = text.splitlines()
    assert re.match(verdict, said) or re.search(verdict, said)
    assert [line.split("  ")[0] for line in table[:6]] == [
        "stage",
        "reading",
        "transfer",
        "first waits",
        "loop waits",
        "loop works",
    ]


def test_a_loader_counts_and_logs_what_its_stages_take() -> None:
    def slow() -> Iterator[torch.Tensor]:
        for _ in range(5):
            time.sleep(0.02)
            yield torch.zeros(100)

    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, Any] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars[tag] = scalar_value, global_step

    loader = MpDeviceLoader(slow(), "cpu")
    for number, _ in enumerate(loader):
        assert loader.counters()["batches"] == number + 1
    sums = loader.counters()
    assert sums["bytes"] == 2000 and sums["requests"] == 5
    assert sums["read_s"] >= 0.1 and sums["first_wait_s"] > 0 and sums["wait_s"] > 0
    assert "slowest stage is reading" in loader.report()
    writer = Writer()
    loader.log(writer, 7)
    assert writer.scalars["input/read_ms"] == (pytest.approx(1e3 * sums["read_s"] / 5), 7)
    assert set(writer.scalars) == {f"input/{name}" for name in means(sums)}
    loader.log(writer, 8)
    assert writer.scalars["input/read_ms"] == (0.0, 8), "since the last call"
