"""Tests `sharded_dataloader`: this process's part of each batch, and its options."""

import os
import sys
import time
from pathlib import Path

import fresh
import pytest
import torch

import spmd_core as spmd
from spmd_core.errors import DataError
from spmd_data import MpDeviceLoader, ShardedSampler, sharded_dataloader
from spmd_data.synthetic import SyntheticTokens


def test_batches_on_the_mesh(mesh: spmd.Mesh) -> None:
    tokens = SyntheticTokens(40, seq=4, vocab_size=9)
    loader = sharded_dataloader(tokens, mesh, "data", batch_size=16, seed=3)
    order = list(ShardedSampler(40, batch_size=16, seed=3))
    spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=True)
    specs = {"input_ids": spec, "targets": None}
    batches = MpDeviceLoader(loader, "xla", input_sharding=specs)
    rows = [row for batch in batches for row in batch["input_ids"].cpu()]
    assert len(rows) == 32
    assert all(torch.equal(row, tokens[i]["input_ids"]) for row, i in zip(rows, order))


def test_the_processes_parts(mesh: spmd.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    count = mesh.size()
    monkeypatch.setattr(
        spmd.distributed, "device_attributes", lambda: [{"process_index": i} for i in range(count)]
    )
    loader = sharded_dataloader(list(range(64)), mesh, "data", batch_size=4 * count, shuffle=False)
    assert loader.batch_size == 4
    assert next(iter(loader)).tolist() == [0, count, 2 * count, 3 * count]


def test_an_axis_without_a_mesh() -> None:
    with pytest.raises(DataError, match=r"got axis='data' and no mesh\. Pass the mesh, or axis="):
        sharded_dataloader([1], None, "data", batch_size=1)
    assert len(sharded_dataloader([1], None, None, batch_size=1)) == 1


_KILLED = """
import os, time
from spmd_data import sharded_dataloader
from spmd_data.synthetic import SyntheticTokens

if __name__ == "__main__":
    tokens = SyntheticTokens(64, seq=4, vocab_size=9)
    loader = sharded_dataloader(tokens, None, None, batch_size=8, num_workers=2)
    batches = iter(loader)
    next(batches)
    print(*(worker.pid for worker in batches._workers), flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_workers_end_when_the_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    process = fresh.Process([script], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        workers = [int(pid) for pid in process.until(lambda said: said.endswith("\n")).split()]
    finally:
        process.end()  # by SIGKILL
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
