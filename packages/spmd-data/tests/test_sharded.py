"""Tests `MpDeviceLoader` on the xla device: shards, programs per batch, the README's sample."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import spmd_core as spmd
from spmd_core.sharding.sharding import Sharding
from spmd_data import MpDeviceLoader


def executions() -> int:
    return spmd.metrics.counters()["executions"]


@pytest.mark.one_device
def test_one_spec_shards_images_and_their_labels(mesh: spmd.Mesh) -> None:
    x_BCHW, y_B = torch.randn(32, 3, 4, 4), torch.arange(32)
    loader = MpDeviceLoader(
        DataLoader(TensorDataset(x_BCHW, y_B), batch_size=16),
        "xla",
        input_sharding=spmd.ShardingSpec(mesh, ("data", None, None, None)),
    )
    batches = list(loader)
    rows = 16 // mesh.size()
    for position, (x, y) in enumerate(batches):
        expected = slice(16 * position, 16 * (position + 1))
        assert x.device.type == y.device.type == "xla"
        assert [tuple(shard.data.shape) for shard in x.local_shards] == [
            (rows, 3, 4, 4)
        ] * mesh.size()
        assert [tuple(shard.data.shape) for shard in y.local_shards] == [(rows,)] * mesh.size()
        assert torch.equal(x.cpu(), x_BCHW[expected])
        assert torch.equal(y.cpu(), y_B[expected])
        assert y.dtype == torch.int64


def test_a_dict_of_specs_shards_by_key(mesh: spmd.Mesh) -> None:
    batch = {
        "ids": torch.arange(48).reshape(16, 3),
        "scale": torch.tensor(2.0),
        "table": torch.ones(16, 2),
        "names": ["a", "b"],
        "pair": (torch.zeros(16),),
    }
    spec = spmd.ShardingSpec(mesh, ("data",))
    specs = {"ids": spec, "scale": spec, "table": None, "names": None, "pair": spec, "unused": None}
    (moved,) = MpDeviceLoader([batch], "xla", input_sharding=specs)
    assert list(moved) == list(batch)
    assert moved["names"] == ["a", "b"]
    replicated = torch.zeros(16, 2, device="xla").sharding_spec
    assert moved["table"].sharding_spec == moved["scale"].sharding_spec == replicated
    assert moved["ids"].sharding_spec == Sharding.of(mesh, ("data", None), 2).text
    assert moved["pair"][0].sharding_spec == Sharding.of(mesh, ("data",), 1).text
    assert torch.equal((moved["ids"] * moved["scale"]).cpu(), batch["ids"] * 2.0)


@pytest.mark.parametrize(("per_execution", "expected"), [(1, 6), (2, 3), (4, 2), (10, 1)])
def test_every_batch_is_a_program_of_its_own(
    per_execution: int, expected: int, mesh: spmd.Mesh
) -> None:
    loader = MpDeviceLoader(
        torch.arange(96.0).split(16),
        "xla",
        input_sharding=spmd.ShardingSpec(mesh, ("data",)),
        batches_per_execution=per_execution,
    )
    spmd.sync()
    before, sums = executions(), []
    for x_B in loader:
        sums.append((x_B * 2).sum())
    assert executions() - before == expected
    assert [total.item() for total in sums] == [
        float(part.sum() * 2) for part in torch.arange(96.0).split(16)
    ]
    assert executions() - before == expected  # reading the values executed nothing


def test_a_step_that_is_left_early_stays_pending(mesh: spmd.Mesh) -> None:
    spmd.sync()
    before = executions()
    for x_B in MpDeviceLoader(
        torch.arange(96.0).split(16), "xla", input_sharding=spmd.ShardingSpec(mesh, ("data",))
    ):
        total = x_B.sum()
        break
    assert executions() == before
    assert total.item() == 120.0


@pytest.mark.parametrize(("policy", "num_rows"), [("keep", [16, 5]), ("drop", [16])])
def test_a_last_batch_that_does_not_divide(
    policy: str, num_rows: list[int], mesh: spmd.Mesh
) -> None:
    if mesh.size() == 1:
        pytest.skip("any batch divides by one device")
    x_N = torch.arange(21.0)
    loader = MpDeviceLoader(
        DataLoader(x_N, batch_size=16),
        "xla",
        input_sharding=spmd.ShardingSpec(mesh, ("data",)),
        uneven_batch=policy,
    )
    batches = list(loader)
    assert [len(x_B) for x_B in batches] == num_rows
    assert torch.equal(torch.cat([x_B.cpu() for x_B in batches]), x_N[: sum(num_rows)])
    assert batches[-1].mean().item() == pytest.approx(
        float(x_N.split(16)[len(num_rows) - 1].mean())
    )


def test_transfers_run_beside_the_recording_of_steps(mesh: spmd.Mesh) -> None:
    """Computes between a hundred batches: neither thread corrupts the other's tensors."""
    host = [torch.full((16, 4), float(index)) for index in range(100)]
    weight = spmd.mark_sharding(torch.ones(4, device="xla"), mesh, (None,))
    sums = []
    for x_BD in MpDeviceLoader(
        host, "xla", input_sharding=spmd.ShardingSpec(mesh, ("data", None)), prefetch=4
    ):
        weight = weight + 0.0
        sums.append((x_BD @ weight).sum())
    assert [total.item() for total in sums] == [64.0 * index for index in range(100)]


def test_the_samples_of_the_readme(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the sample is written for eight devices")
    monkeypatch.setenv("HOME", str(tmp_path))  # where the sample puts its cache
    sample, resume, packed = re.findall(
        r"```python\n(.*?)```",
        (Path(__file__).parents[1] / "README.md").read_text(),
        flags=re.DOTALL,
    )
    names: dict[str, Any] = {}
    exec(compile(sample, "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("(16, 3, 8, 8) 8 ") for line in lines)
    exec(compile(resume, "README.md", "exec"), names)
    assert capsys.readouterr().out == "6\n"
    exec(compile(packed, "README.md", "exec"), names)
    assert capsys.readouterr().out == "2 11\n"


def blocks(x: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(shard.data.shape) for shard in x.local_shards]


def test_nested_batches_by_structure_and_by_function(mesh: spmd.Mesh) -> None:
    rows = spmd.ShardingSpec(mesh, ("data", None))
    batch = {"image": torch.arange(64.0).reshape(16, 4), "more": [torch.arange(16), "name"]}
    size = 16 // mesh.size()
    for sharding in (
        {"image": rows, "more": [rows_1d(mesh), None]},
        lambda path, tensor: rows if path[0] == "image" else rows_1d(mesh),
    ):
        (out,) = MpDeviceLoader([batch], "xla", input_sharding=sharding, transfer_threads=2)
        assert blocks(out["image"]) == [(size, 4)] * mesh.size()
        assert blocks(out["more"][0]) == [(size,)] * mesh.size() and out["more"][1] == "name"
        assert torch.equal(out["image"].cpu(), batch["image"])


def rows_1d(mesh: spmd.Mesh) -> spmd.ShardingSpec:
    return spmd.ShardingSpec(mesh, ("data",))


def test_a_padded_tail_has_the_shape_and_the_program_of_the_others(mesh: spmd.Mesh) -> None:
    x = torch.arange(40.0)
    loader = MpDeviceLoader(
        DataLoader(x, batch_size=16),
        "xla",
        input_sharding=rows_1d(mesh),
        uneven_batch="pad",
    )
    total, rows = 0.0, 0
    for x_B, mask_B in loader:
        assert x_B.shape == mask_B.shape == (16,) and blocks(mask_B) == blocks(x_B)
        total += torch.where(mask_B, x_B, 0.0).sum().item()
        rows += int(mask_B.sum().item())
    assert (total, rows) == (x.sum().item(), 40)


def test_the_source_may_write_to_its_memory_again(mesh: spmd.Mesh) -> None:
    def reusing() -> Iterator[Any]:
        x, y = torch.zeros(16, 4), np.zeros((16, 4))
        for index in range(8):
            x.fill_(index)
            y.fill(index)
            yield x, y

    sharding = spmd.ShardingSpec(mesh, ("data", None))
    for index, (x, y) in enumerate(MpDeviceLoader(reusing(), "xla", input_sharding=sharding)):
        assert (x == index).all().item() and (y == index).all().item()
        assert y.dtype == torch.float64


def test_batches_of_hugging_faces_libraries(mesh: spmd.Mesh) -> None:
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    rows = {"ids": [[i, i + 1] for i in range(32)], "label": list(range(32))}
    data = datasets.Dataset.from_dict(rows)
    sharding = {"ids": spmd.ShardingSpec(mesh, ("data", None)), "label": rows_1d(mesh)}
    for source in (
        DataLoader(data.with_format("torch"), batch_size=16),
        data.with_format("torch").iter(batch_size=16),
        data.with_format("numpy").iter(batch_size=16),
        [transformers.BatchEncoding(batch) for batch in data.with_format("torch").iter(16)],
    ):
        out = list(MpDeviceLoader(source, "xla", input_sharding=sharding))
        assert torch.cat([batch["ids"].cpu() for batch in out]).tolist() == rows["ids"]
        assert torch.cat([batch["label"].cpu() for batch in out]).tolist() == rows["label"]
        assert len(out[0]["ids"].local_shards) == mesh.size()
    assert type(out[0]) is transformers.BatchEncoding


def test_a_mesh_of_other_devices_is_an_error() -> None:
    num = spmd.global_runtime_device_count()
    elsewhere = spmd.Mesh(range(num, 2 * num), (num,), ("data",))
    loader = MpDeviceLoader([torch.zeros(16)], "xla", input_sharding=rows_1d(elsewhere))
    with pytest.raises(spmd.errors.MeshError, match=rf"{num}"):
        list(loader)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_whose_every_batch_is_dropped_is_an_error(prefetch: int) -> None:
    mesh = spmd.Mesh(range(8), (8,), ("data",))
    loader = MpDeviceLoader(
        DataLoader(torch.arange(20), batch_size=7, drop_last=True),
        "xla",
        input_sharding=spmd.ShardingSpec(mesh, ("data",)),
        uneven_batch="drop",
        prefetch=prefetch,
    )
    with pytest.raises(
        spmd.errors.DataError,
        match=r"got 2 that uneven_batch='drop' left out\. Choose a batch size that div",
    ):
        list(loader)
