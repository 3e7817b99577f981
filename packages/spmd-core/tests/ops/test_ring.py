"""Which chunks of a causal sequence each device of a ring computes, and of whose keys."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from spmd_core.ops.kernels import ring


def causal(size: int) -> Any:
    layout = SimpleNamespace(rows=("x",), count=lambda axes: size)
    return ring._Ring(SimpleNamespace(is_causal=True), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_device_computes_an_early_and_a_late_chunk(size: int) -> None:
    chunks: dict[int, list[int]] = {device: [] for device in range(size)}
    for parity in (0, 1):
        for device, target in enumerate(causal(size)._targets(parity)):
            chunks[target].append(2 * device + parity)
    assert {k: sorted(v) for k, v in chunks.items()} == {
        device: [device, 2 * size - 1 - device] for device in range(size)
    }


@pytest.mark.parametrize(("source", "pairs"), [(0, [(1, 0), (0, 0)]), (2, [(1, 0), (1, 1)])])
def test_keys_of_devices_before_and_behind(source, pairs, monkeypatch) -> None:
    of_one = causal(3)
    monkeypatch.setattr(of_one, "_index", lambda: jnp.int32(1))
    (found,) = of_one._pairs(jnp.int32(source))
    assert not found.is_causal
    assert [*zip(found.rows.tolist(), found.keys.tolist())] == pairs
