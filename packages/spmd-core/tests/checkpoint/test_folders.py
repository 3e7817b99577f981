"""`CheckpointManager`: steps, files and folders; what is damaged, refused or of another run."""

import errno
import glob
import json
import os
import re

import pytest
import torch
from checkpoint_runs import make, same

import spmd_core as spmd
from spmd_core.checkpoint import (
    CheckpointManager,
    database,
    load_checkpoint,
    lock,
    store,
    writer,
)
from spmd_core.checkpoint import manager as managing
from spmd_core.errors import CheckpointError


@pytest.fixture
def trained(mesh_2d):
    """A run of three steps on two axes."""
    run = make(mesh_2d, ("a", "b"), ("b", "a"), (None, "a"))
    run.train(3)
    return run


def test_steps_and_what_stays(tmp_path):
    t = torch.ones(2)
    with CheckpointManager(tmp_path, every=5, keep=1, keep_best="loss") as saving:
        assert [step for step in range(11) if saving.should_save(step)] == [0, 5, 10]
        assert saving.latest() is None and saving.all_steps() == []
        for step, loss in ((0, 3.0), (5, 1.0), (10, 2.0), (15, 4.0)):
            saving.save(step, {"t": t}, metrics={"loss": loss})
        saving.wait()
        assert saving.all_steps() == [5, 15] and saving.latest() == 15
        with pytest.raises(CheckpointError, match="each save has that metric"):
            saving.save(20, {"t": t})
        with pytest.raises(CheckpointError, match=r"has no step 7\. Its steps are 5, 15\."):
            saving.restore({"t": t}, 7)
        with pytest.raises(CheckpointError, match=r"has step 15\. Its steps are 5, 15\. Save"):
            saving.save(15, {"t": t}, metrics={"loss": 0})


def test_a_run_goes_on_from_an_earlier_step(tmp_path, monkeypatch):
    t = torch.zeros(2)
    with CheckpointManager(tmp_path) as saving:
        for step in range(4):
            saving.save(step, {"t": t + step})
        with pytest.raises(CheckpointError, match=r"has no step 9\. Its steps are 0, 1, 2, 3\."):
            saving.remove_after(9)
        saving.remove_after(3)
        assert saving.all_steps() == [0, 1, 2, 3]
        with monkeypatch.context() as patch:
            patch.setattr(lock.shutil, "rmtree", lambda path: None)  # killed before that
            saving.remove_after(1)
        assert saving.all_steps() == [0, 1]
        saving.save(2, {"t": t + 7})
        saving.restore({"t": t})
    assert (t == 7).all()


def test_a_folder_without_steps(tmp_path):
    with (
        CheckpointManager(tmp_path / "new") as empty,
        pytest.raises(CheckpointError, match=r"has no step\. Its steps are none\. Save one first"),
    ):
        empty.restore({"t": torch.ones(1)})


def test_latest_asks_the_disk(tmp_path):
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(1, {"t": torch.ones(1)})
        saving.save(2, {"t": torch.ones(1)})
        lock.remove_step(tmp_path / "2")
        (tmp_path / "3").mkdir()  # no step: what is written last is not there
        (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
        assert saving.all_steps() == [1] and saving.latest() == 1


def test_a_save_that_fails_is_told_by_the_next_call(tmp_path, monkeypatch, capfd):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with CheckpointManager(tmp_path) as saving:
        saving.save(1, {"t": torch.ones(1)})
        saving.wait()
        with monkeypatch.context() as patch:
            patch.setattr(database, "write", full)
            saving.save(2, {"t": torch.zeros(1)})
            told = r"step 2 could not be written .*No space left.*Earlier steps are as they were: 1"
            with pytest.raises(CheckpointError, match=told):
                saving.save(3, {"t": torch.zeros(1)})
        assert saving.all_steps() == [1]
        assert not [name for name in os.listdir(tmp_path) if lock.UNFINISHED in name]
        saving.save(3, {"t": torch.zeros(1)})
        saving.wait()
        assert saving.restore({"t": torch.ones(1)}, 1).step == 1
        assert saving.all_steps() == [1, 3]
    assert "Traceback" not in capfd.readouterr().err


def test_a_folder_that_becomes_read_only(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    t = torch.ones(3)
    with CheckpointManager(tmp_path) as saving:
        saving.save(1, {"t": t})
        saving.wait()
        with monkeypatch.context() as patch:
            patch.setattr(database, "write", refused)
            told = r"step 2 could not be written to .*Read-only.*as they were: 1\. .*another folder"
            saving.save(2, {"t": t})
            with pytest.raises(CheckpointError, match=told):
                saving.wait()
            patch.undo()
            # Behind the program, where what was begun cannot be removed either.
            patch.setattr(writer.Writer, "write", refused)
            patch.setattr(lock, "remove_leftovers", refused)
            saving.save(3, {"t": t})
            with pytest.raises(CheckpointError, match=r"step 3 could not be written .*Read-only"):
                saving.wait()
        t.zero_()
        assert saving.restore({"t": t}, 1).step == 1 and (t == 1).all()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EROFS, OSError), (errno.EACCES, PermissionError)]
)
def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch, number, kind):
    def refused(path, *arguments, **options):
        raise OSError(number, os.strerror(number), str(path))

    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(1, {"t": torch.ones(3)})
    monkeypatch.setattr(lock.os, "open", refused)
    told = rf"may be made and changed; got {tmp_path}: {os.strerror(number)}\. Name another folder"
    with pytest.raises(kind, match=told) as caught:
        CheckpointManager(tmp_path)
    monkeypatch.undo()
    assert "to read alone, call load_checkpoint" in str(caught.value)
    t = torch.zeros(3)
    assert load_checkpoint(tmp_path, {"t": t}).step == 1 and (t == 1).all()


def test_names_that_are_paths(tmp_path):
    state = {"t": {"..": torch.ones(2), "...": torch.zeros(3), "a..b": torch.ones(1)}}
    with CheckpointManager(tmp_path / "runs", async_=False) as saving:
        for name in ("a/c", "../a", "/"):
            told = rf"names of tensors have no slash.*got 't\.{re.escape(name)}'\. Rename"
            with pytest.raises(CheckpointError, match=told):
                saving.save(0, {"t": {name: torch.ones(1)}})
        with pytest.raises(CheckpointError, match=r"got '\.\.'\. Rename it"):
            saving.save(0, {"..": torch.ones(1)})
        assert saving.all_steps() == []
        saving.save(0, state)
        found = {"t": {name: torch.full_like(t, 7) for name, t in state["t"].items()}}
        saving.restore(found)
    same(found["t"], state["t"])
    assert os.listdir(tmp_path) == ["runs"]


def test_what_is_damaged_is_told_and_the_step_before_restores(tmp_path, mesh_1d):
    t = spmd.mark_sharding(torch.arange(4096.0).to("xla"), mesh_1d, ("x",))
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in range(4):
            saving.save(step, {"t": t})
        _corrupt(tmp_path / "3")
        told = r"step 3 in .* cannot be read: .*t/c/\d is not what its checksum says"
        with pytest.raises(CheckpointError, match=told):
            saving.restore({"t": t})
        os.remove(max(glob.glob(f"{tmp_path}/2/arrays/d/*"), key=os.path.getsize))
        with pytest.raises(
            CheckpointError, match=r"step 2 in .* cannot be read: .*Restore the step before.*step=1"
        ):
            saving.restore({"t": t}, 2)
        (tmp_path / "1" / "state" / "metadata").write_text("{")
        with pytest.raises(CheckpointError, match=r"step 1 in .* cannot be read: .*metadata"):
            saving.restore({"t": t}, 1)
        (tmp_path / "3" / "state" / "metadata").write_text("[]")
        with pytest.raises(CheckpointError, match="is not what its checksum says"):
            saving.restore({"t": t}, 3)
        t.zero_()
        saving.restore({"t": t}, 0)
    assert torch.equal(t.cpu(), torch.arange(4096.0))


def _corrupt(step):
    """Changes bytes in the middle of the largest file of a step's arrays."""
    largest = max(glob.glob(f"{step}/arrays/d/*"), key=os.path.getsize)
    with open(largest, "r+b") as file:
        file.seek(os.path.getsize(largest) // 2)
        file.write(b"\0\1\2\3")


@pytest.mark.one_device
@pytest.mark.parametrize("device", ["xla", "cpu"])
def test_a_restore_that_fails_changes_nothing(tmp_path, mesh_2d, device):
    axes = (("a", "b"), ("b", "a"), (None, "a"))
    run = make(mesh_2d, *axes) if device == "xla" else make(None, device="cpu")
    last = torch.zeros(4096).to(device)
    state = run.state(tail={"last": last}, generator=torch.Generator(device).manual_seed(3))
    run.train(1)
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in (1, 2):
            saving.save(step, state)
        saved = run.values()
        _corrupt(tmp_path / "2")
        run.train(2)
        last += 1
        state["generator"].manual_seed(4)
        before, random = run.values(), torch.get_rng_state()
        drawn, epoch = state["generator"].get_state(), run.scheduler.last_epoch
        told = r"step 2 in .* cannot be read: tail\.last: .*tail.last/c/0.*step=1\)\.$"
        with pytest.raises(CheckpointError, match=told):
            saving.restore(state)
        same(run.values(), before)
        assert (last.cpu() == 1).all() and torch.equal(torch.get_rng_state(), random)
        assert torch.equal(state["generator"].get_state(), drawn)
        assert run.scheduler.last_epoch == epoch
        # Without the check, what was read before has its values.
        with pytest.raises(CheckpointError, match=told):
            saving.restore(state, check=False)
        same(run.values(), saved)
        saving.restore(state, 1)
        same(run.values(), saved)
        assert (last.cpu() == 0).all() and run.scheduler.last_epoch == 1


def test_a_restore_that_fails_leaves_what_is_not_computed_yet(tmp_path, mesh_1d):
    """What comes into tensors without values is read once, and kept until all is right."""
    saved = torch.arange(4096.0)
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in (1, 2):
            saving.save(step, {"a": saved, "b": saved})
        _corrupt(tmp_path / "2")
        drawn = spmd.mark_sharding(torch.full((4096,), 3.0, device="xla"), mesh_1d, ("x",))
        state = {"a": drawn, "b": torch.full((4096,), 4.0, device="xla")}
        with pytest.raises(CheckpointError, match=r"step 2 in .* cannot be read"):
            saving.restore(state)
        assert drawn._handle.value.data is None  # and is still to be computed
        assert (drawn.cpu() == 3).all() and (state["b"].cpu() == 4).all()
        saving.restore(state, 1)
        assert torch.equal(drawn.cpu(), saved) and drawn.sharding_spec is not None


def test_a_state_that_does_not_belong_to_its_arrays(tmp_path):
    t = torch.ones(3)
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, {"t": t})
        path = tmp_path / "0" / "state" / "metadata"
        about = json.loads(path.read_text())
        about["parts"]["t"]["shape"] = [4]
        path.write_text(json.dumps(about))
        with pytest.raises(CheckpointError, match="metadata is not what its checksum says"):
            saving.restore({"t": torch.ones(4)})
        del about["sha256"]
        path.write_text(json.dumps(about | {"sha256": store._checksum(about)}))
        with pytest.raises(
            CheckpointError, match=r"t is torch.float32\[3\] there, and not float32"
        ):
            saving.restore({"t": torch.ones(4)})
        about["format"] = 99
        path.write_text(json.dumps(about | {"sha256": store._checksum(about)}))
        with pytest.raises(CheckpointError, match="reads checkpoints of format 1; got format 99"):
            saving.restore({"t": t})


def test_a_folder_of_another_run(tmp_path):
    with CheckpointManager(tmp_path, identity={"model": "tiny", "seed": 1}):
        pass
    with pytest.raises(CheckpointError, match=r"of another: seed: 1 there, 2 here; data: None the"):
        CheckpointManager(tmp_path, identity={"model": "tiny", "seed": 2, "data": "x"})
    CheckpointManager(tmp_path, identity={"model": "tiny", "seed": 1}).close()
    CheckpointManager(tmp_path).close()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"says whose they are; .* cannot be read"):
        CheckpointManager(tmp_path, identity={"seed": 1})


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    first = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="another, which is alive"):
        CheckpointManager(tmp_path)
    first.close()
    first.close()
    CheckpointManager(tmp_path).close()
    for call in (lambda: first.save(0, {"t": 1}), lambda: first.restore({"t": 1})):
        with pytest.raises(CheckpointError, match="a manager is used until it is closed"):
            call()


def test_arguments_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every counts steps, from 1; got 0"):
        CheckpointManager(tmp_path, every=0)
    with pytest.raises(TypeError, match="folder"):
        CheckpointManager(3)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        CheckpointManager(tmp_path / "file")
    with CheckpointManager(tmp_path / "runs") as saving:
        with pytest.raises(CheckpointError, match="steps are counted from 0; got -1"):
            saving.save(-1, {"t": 1})
        with pytest.raises(CheckpointError, match="'random' is the name of the state"):
            saving.save(0, {"random": 1})
        with pytest.raises(CheckpointError, match="metrics holds plain values; got a tensor"):
            managing._no_tensor("metrics", None)
        assert saving.all_steps() == []
