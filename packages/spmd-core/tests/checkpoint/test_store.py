"""What lies on the disk: Orbax reads it, it is few files, and a missing package is told."""

import os
import sys

import fresh
import numpy as np
import pytest
import torch

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, store
from spmd_core.checkpoint.disk_arrays import DiskArrays


@pytest.mark.one_device
def test_orbax_reads_what_is_written(tmp_path, mesh_2d):
    import orbax.checkpoint as ocp  # noqa: PLC0415 - nothing else needs it

    right = {
        "split": torch.arange(35.0).reshape(5, 7),
        "half": torch.linspace(0, 1, 6).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j, 3j]),
    }
    given = {name: t.to("xla") for name, t in right.items()}
    spmd.mark_sharding(given["split"], mesh_2d, ("b", "a"))
    spmd.mark_sharding(given["half"], mesh_2d, (("a", "b"),))
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, {"t": given})
        zeros = {name: torch.zeros_like(t) for name, t in right.items()}
        saving.restore({"t": zeros})
    whole = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    assert set(whole.metadata(tmp_path / "0").item_metadata) == {store.ARRAYS, store.STATE}
    both = whole.restore(tmp_path / "0")
    assert both[store.STATE]["step"] == 0
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "0" / store.ARRAYS)
    assert np.array_equal(both[store.ARRAYS]["t"]["split"], found["t"]["split"])
    for name, t in right.items():
        assert torch.equal(zeros[name], t)
        if t.dtype is not torch.bfloat16:
            assert np.array_equal(found["t"][name], t.numpy()), name
    assert found["t"]["half"].astype(np.float32).tolist() == right["half"].float().tolist()


def test_many_small_arrays_lie_in_few_files(tmp_path):
    state = {"t": {f"p{i}": torch.full((3,), i) for i in range(300)}}
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, state)
        saving.restore({"t": {name: torch.zeros_like(t) for name, t in state["t"].items()}})
    assert sum(len(files) for _, _, files in os.walk(tmp_path / "0")) < 40


@pytest.mark.one_device
def test_each_block_is_written_once(tmp_path, mesh_1d):
    t = spmd.mark_sharding(torch.rand(64, 1024).to("xla"), mesh_1d, ())  # all devices hold it
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, {"t": t, "again": t})
    size = sum(p.stat().st_size for p in (tmp_path / "0" / "arrays").rglob("*") if p.is_file())
    assert t.nbytes < size < 1.2 * t.nbytes


def test_each_chunk_is_read_once_into_whatever_blocks_need_it(tmp_path, mesh_2d, monkeypatch):
    """Saved in bands of rows, restored by columns: each block needs a part of every chunk."""
    monkeypatch.setattr(store, "_READ_BYTES", 1)
    rows = spmd.Mesh(range(mesh_2d.size()), (mesh_2d.size(),), ("x",))
    right = torch.arange(35.0 * 9).reshape(35, 9)
    saved = spmd.mark_sharding(right.to("xla"), rows, ("x",))
    by_both = spmd.mark_sharding(torch.zeros(35, 9, device="xla"), mesh_2d, ("b", "a"))
    spmd.sync()  # it has values, and the first one below has none
    targets = [
        spmd.mark_sharding(torch.empty(35, 9, device="xla"), mesh_2d, (None, ("a", "b"))),
        by_both,
        torch.zeros(35, 9),
        torch.zeros(9, 35).t(),
    ]
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, {"t": {"t": saved}})
        grid = store.Reader(tmp_path / "0").array("t.t").chunks
        read, chunk = [], DiskArrays.chunk
        monkeypatch.setattr(DiskArrays, "chunk", lambda *a: (read.append(a), chunk(*a)))
        for target in targets:
            read.clear()
            saving.restore({"t": {"t": target}})
            assert torch.equal(target.cpu(), right)
            once = -(-35 // grid[0])
            assert len(read) - 1 == (once if target is targets[0] else 2 * once)  # and `random`


@pytest.mark.parametrize("package", ["tensorstore", "google_crc32c"])
def test_without_the_extra_the_import_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("spmd_core.checkpoint")]:
        monkeypatch.delitem(sys.modules, name)
    told = rf"got .*{package}.* Run: pip install 'spmd-core\[checkpoint\]'"
    with pytest.raises(ImportError, match=told):
        _ = spmd.CheckpointManager


MEMORY = """
import sys, torch
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(8)
spmd.use_spmd()
torch.ones(8, device="xla").sum().item()

def run(axes, spec):
    mesh = spmd.Mesh(range(8), axes, ("x", "y")[: len(axes)])
    with torch.device("xla"):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    for layer in model:
        spmd.mark_sharding(layer.weight, mesh, spec)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

def field(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def grown(call):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is from now
    before = field("VmRSS")
    call()
    return (field("VmHWM") - before) / num_bytes

state = run((8,), ("x",))
state["model"](torch.ones(1, 2048, device="xla")).sum().backward()
state["optimizer"].step()
state["optimizer"].zero_grad()
spmd.sync(wait=True)
num_bytes = 3 * sum(p.nbytes for p in state["model"].parameters())
with spmd.CheckpointManager(sys.argv[1]) as manager:
    print("save", grown(lambda: (manager.save(0, state), manager.wait())))
    print("again", grown(lambda: (manager.save(1, state), manager.wait())))
    other = run((4, 2), ("y", "x"))
    print("restore", grown(lambda: manager.restore(other)) - 1)
    print("over", grown(lambda: manager.restore(other)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux resets the peak")
def test_memory_beside_the_process(tmp_path):
    """Over the bytes of the state, 302 MB: parameters and moments of six layers."""
    done = fresh.run(["-c", MEMORY, tmp_path], dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert 0.9 < found["save"] < 1.3, found
    assert found["again"] < 0.3, found  # into the memory of the first
    assert found["restore"] < 0.3, found
    assert found["over"] < 0.1, found  # one tensor, whose values before are there until then
