"""Folders in a store of objects: tensorstore's in memory, and as files for several processes."""

import json

import launched
import pytest
import torch
from checkpoint_runs import make, same

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, command, load_checkpoint, remote, store
from spmd_core.checkpoint.remote import RemotePath
from spmd_core.errors import CheckpointError


@pytest.fixture
def place(tmp_path):
    """An address that no other test has."""
    folder = RemotePath(f"memory://{tmp_path}/runs")
    yield folder
    folder.rmtree()


@pytest.mark.one_device
def test_saved_there_and_restored_on_another_mesh(place, mesh_1d, mesh_2d, capsys, tmp_path):
    run = make(mesh_2d, ("a", "b"), ("b", "a"), (None, "a"))
    with CheckpointManager(str(place), keep=2, identity={"seed": 0}) as saving:
        assert saving.all_steps() == []
        for step in (1, 2, 3):
            run.train(1)
            saving.save(step, run.state(epoch=step))
        saving.wait()
        assert saving.all_steps() == [2, 3]
        assert {path.name for path in place.iterdir()} == {"2", "3", ".lock", "run.json"}
    assert not (place / ".lock").exists()
    for other in (make(mesh_1d, ("x",), (None, "x"), seed=1), make(None, device="cpu", seed=2)):
        with CheckpointManager(str(place)) as restoring:
            assert restoring.restore(other.state(epoch=0)).state["epoch"] == 3
        same(other.values(), run.values())
    other = make(mesh_1d, seed=3)
    assert load_checkpoint(str(place), {"model": other.model}, 3).step == 3
    with pytest.raises(CheckpointError, match=r"of another: seed: 0 there, 1 here"):
        CheckpointManager(str(place), identity={"seed": 1})
    assert command.main(["verify", str(place)]) == command.main(["ls", str(place)]) == 0
    assert "as written" in capsys.readouterr().out
    assert command.main(["convert", str(place), f"{tmp_path}/model.safetensors"]) == 0
    assert (
        command.main(["convert", f"{tmp_path}/model.safetensors", str(place), "--step", "9"]) == 0
    )
    assert command.main(["show", str(place), "--step", "9"]) == 0
    assert "model.body.0.weight" in capsys.readouterr().out


def test_a_step_that_is_not_whole_is_none_and_goes(place, monkeypatch):
    t = torch.arange(3.0)
    with CheckpointManager(str(place), async_=False) as saving:
        saving.save(1, {"t": t})
        with monkeypatch.context() as patch:
            patch.setattr(remote.RemoteLock, "check", lambda self: 1 / 0)  # before the last object
            with pytest.raises(
                CheckpointError, match=r"step 2 could not be written to memory://.*: 1"
            ):
                saving.save(2, {"t": t})
        assert saving.all_steps() == [1] and not (place / "2").exists()
        saving.save(2, {"t": t})
        assert saving.all_steps() == [1, 2]
    (place / "7" / "arrays" / "d").write_text("of a run that was killed")
    (place / "2" / "_CHECKPOINT_METADATA").unlink()  # killed while it was removed
    with CheckpointManager(str(place)) as again:
        assert again.all_steps() == [1]
        assert {path.name for path in place.iterdir()} == {"1", ".lock"}


def test_a_second_run_takes_the_folder_over(place):
    t = torch.ones(2)
    with CheckpointManager(str(place), async_=False) as first:
        first.save(1, {"t": t})
        with CheckpointManager(str(place), async_=False) as second:
            with pytest.raises(
                CheckpointError, match=r"was taken over by another: .*host.*End one"
            ):
                first.save(2, {"t": t})
            second.save(3, {"t": t})
        assert first.all_steps() == [1, 3]
        with pytest.raises(CheckpointError, match="another: which has ended"):
            first.save(4, {"t": t})


def test_what_is_damaged_there(place):
    t = torch.arange(4096.0)
    with CheckpointManager(str(place), async_=False) as saving:
        for step in (1, 2):
            saving.save(step, {"t": t})
        (place / "2" / "state" / "metadata").write_text("{")
        with pytest.raises(
            CheckpointError, match=r"step 2 in memory://.* cannot be read: .*step=1"
        ):
            saving.restore({"t": t})
        (place / "2" / "state" / "metadata").unlink()
        with pytest.raises(CheckpointError, match=r"metadata: there is no memory://"):
            saving.restore({"t": t})
        files = [*(place / "1" / "arrays" / "d").iterdir()]
        for file in files:
            file.unlink()
        with pytest.raises(CheckpointError, match=r"step 1 in .* cannot be read: "):
            saving.restore({"t": t}, 1)


def test_addresses_that_are_refused():
    told = r"begins with gs:// or s3://; got 'ftp://b'\. Pass one"
    with pytest.raises(CheckpointError, match=told):
        CheckpointManager("ftp://b")
    with pytest.raises(
        OSError, match=r"may be made and changed; got gs://B_/x: .*Invalid GCS bucket.*Name an"
    ):
        CheckpointManager("gs://B_/x")


PROGRAM = """
import json, sys
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(4)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
spmd.use_spmd()
from checkpoint_runs import make
from spmd_core.checkpoint import CheckpointManager, remote
from spmd_core.errors import CheckpointError
remote.SCHEMES += ("file://",)
run = make(spmd.Mesh(range(8), (4, 2), ("a", "b")), ("a", "b"), ("b", "a"), (None, "a"))
with CheckpointManager(f"file://{folder}", keep=1) as manager:
    for step in (1, 2):
        run.train(1)
        manager.save(step, run.state())
    manager.wait()
    assert manager.all_steps() == [2]
    other = make(spmd.Mesh(range(8), (8,), ("x",)), (None, "x"), ("x",), seed=1)
    manager.restore(other.state())
    losses = other.train(2)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(losses, file)
"""


@pytest.mark.exhaustive
def test_two_processes_write_there(tmp_path, mesh_1d, monkeypatch):
    launched.succeed(2, lambda rank, port: ["-c", PROGRAM, tmp_path, port, rank])
    monkeypatch.setattr(remote, "SCHEMES", (*remote.SCHEMES, "file://"))
    run = make(mesh_1d, ("x",), seed=4)
    with CheckpointManager(f"file://{tmp_path}") as restoring:
        assert restoring.restore(run.state()).step == 2
    losses = run.train(2)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(
            losses, rel=1e-5
        )
    files = (tmp_path / "2" / store.ARRAYS).glob("ocdbt.process_*")
    assert sorted(path.name for path in files) == ["ocdbt.process_0", "ocdbt.process_1"]
    spmd.sync(wait=True)
