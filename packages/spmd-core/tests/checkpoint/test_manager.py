"""`CheckpointManager`: saved on one mesh, restored on others; what it refuses; what survives."""

import errno
import glob
import json
import math
import os
import re
import threading
import time

import fresh
import pytest
import torch
from checkpoint_runs import make, same
from tiers import by_tier
from torch import nn

import spmd_core as spmd
from spmd_core import counters
from spmd_core.checkpoint import (
    CheckpointManager,
    database,
    load_checkpoint,
    lock,
    pace,
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


@pytest.mark.one_device
def test_restored_anywhere_to_the_last_bit(tmp_path, trained, mesh_1d, mesh_2d):
    with CheckpointManager(tmp_path) as saving:
        saving.save(3, trained.state(epoch=2))
    right, losses = trained.values(), trained.train(5)
    others = [
        make(mesh_2d, ("a", "b"), ("b", "a"), (None, "a"), seed=1),
        make(mesh_1d, ("x",), (None, "x"), ("x",), seed=2),
        make(None, seed=3),
        make(None, device="cpu", seed=4),
    ]
    others[1].train(1)  # its optimizer has a state already
    with CheckpointManager(tmp_path) as restoring:
        for run in others:
            done = restoring.restore(run.state(epoch=0))
            assert (done.step, done.state["epoch"], done.missing, done.extra) == (3, 2, [], [])
            same(run.values(), right)
            assert run.optimizer.param_groups[1]["initial_lr"] == 3e-3
            assert run.scheduler.last_epoch == 3
            assert run.model.head.weight is run.model.embed.weight
            weight = run.optimizer.state[run.model.embed.weight]["exp_avg"]
            if run.device == "xla":
                assert weight.sharding_spec == run.model.embed.weight.sharding_spec
            found = run.train(5)
            # Another mesh adds in another order.
            assert found == losses if run is others[0] else found == pytest.approx(losses, rel=1e-5)


class Exact(nn.Module):
    """Two layers beside each other, of few bits: no order of the sums changes a bit of a loss."""

    def __init__(self, device):
        super().__init__()
        self.a, self.b = (nn.Linear(16, n, bias=n > 8, device=device) for n in (8, 16))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-4, 5, p.shape) / 4)

    def train_on(self, optimizer, steps):
        losses = []
        for _ in range(steps):
            x, u, v = (
                torch.randint(-1, 2, (8, n)).float().to(self.a.weight.device) for n in WIDTHS
            )
            loss = ((self.a(x) * u).sum() + (self.b(x) * v).sum()) / 8
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


WIDTHS = (16, 8, 16)


def exact(shape, seed):
    """Such a model over a mesh of so many rows and columns, or on the CPU; and its optimizer."""
    torch.manual_seed(seed)
    model = Exact("cpu" if shape is None else "xla")
    if shape is not None:
        mesh = spmd.Mesh(range(math.prod(shape)), shape, ("a", "b"))
        for layer in (model.a, model.b):
            spmd.mark_sharding(layer.weight, mesh, ("a", "b"))
    return model, torch.optim.SGD(model.parameters(), lr=1 / 16, momentum=0.5)


def test_the_losses_after_a_restore_are_the_same_to_the_last_bit(tmp_path, num_devices):
    """Saved on 2 x 4 devices; restored on 1 x 8, 4 x 2, 1 x 1, and in eager torch."""
    if num_devices < 8:
        pytest.skip("2 x 4 devices are eight")
    model, optimizer = exact((2, 4), seed=0)
    model.train_on(optimizer, 3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, {"model": model, "optimizer": optimizer})
        saved = {name: p.cpu() for name, p in model.state_dict().items()}
        moments = [optimizer.state[p]["momentum_buffer"].cpu() for p in model.parameters()]
        random = torch.get_rng_state()
        losses = model.train_on(optimizer, 5)
        assert len({*losses}) == 5 and any(loss % 1 for loss in losses)
        for seed, shape in enumerate([(1, 8), (4, 2), (1, 1), None], start=1):
            other, its = exact(shape, seed)
            manager.restore({"model": other, "optimizer": its})
            same({name: p.cpu() for name, p in other.state_dict().items()}, saved)
            for p, right in zip(other.parameters(), moments):
                assert torch.equal(its.state[p]["momentum_buffer"].cpu(), right)
            assert torch.equal(torch.get_rng_state(), random)
            assert other.train_on(its, 5) == losses, shape


def test_what_trains_on_does_not_change_what_is_saved(tmp_path, trained, monkeypatch):
    before = trained.values()
    going_on = threading.Event()
    write = database.write

    def late(*arguments):
        going_on.wait()
        write(*arguments)

    monkeypatch.setattr(database, "write", late)
    with CheckpointManager(tmp_path) as saving:
        saving.save(3, trained.state())
        assert saving.latest() is None
        donated = counters.counter("donated_bytes")
        trained.train(2)
        assert counters.counter("donated_bytes") > donated  # those that are being saved
        going_on.set()
        saving.wait()
        assert saving.latest() == 3
        saving.restore(trained.state())
    same(trained.values(), before)


def test_state_dicts_and_plain_values(tmp_path, trained):
    state = {
        "model": trained.model.state_dict(),
        "optimizer": trained.optimizer.state_dict(),
        "best": (1, math.inf),
        "generator": torch.Generator("xla").manual_seed(5),
    }
    drawn = torch.Generator().manual_seed(5)
    right = {name: t.cpu().clone() for name, t in trained.model.state_dict().items()}
    moments = trained.values()["body.0.weight.exp_avg"]
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, state)
        trained.train(1)
        state |= {"model": trained.model.state_dict(), "best": None}
        state["generator"].manual_seed(6)
        fresh_optimizer = make(None, device="cpu").optimizer
        state["optimizer"] = fresh_optimizer.state_dict()
        done = saving.restore(state).state
    assert done["best"] == (1, math.inf)
    same({name: t.cpu() for name, t in trained.model.state_dict().items()}, right)
    assert torch.equal(state["generator"].get_state(), drawn.get_state())
    fresh_optimizer.load_state_dict(done["optimizer"])
    assert any(
        torch.equal(s["exp_avg"], moments)
        for s in fresh_optimizer.state.values()
        if s["exp_avg"].shape == moments.shape
    )


def test_all_differences_at_once_and_nothing_changes(tmp_path, trained):
    with CheckpointManager(tmp_path) as saving:
        saving.save(1, trained.state(epoch=1))
    other = make(None, device="cpu", seed=1)
    other.model.body[0] = nn.Linear(6, 12)
    other.model.extra = nn.Linear(2, 2)
    other.model.count = torch.zeros((), dtype=torch.int32)
    del other.model.body[2]
    before = {name: t.clone() for name, t in other.model.state_dict().items()}
    state = {"model": other.model, "sampler": 3}
    with CheckpointManager(tmp_path) as restoring:
        with pytest.raises(CheckpointError) as caught:
            restoring.restore(state)
        for told in (
            "another shape: model.body.0.weight, [10, 6] for [12, 6]",
            "another dtype: model.count, torch.int64 for torch.int32",
            "missing: model.extra.weight",
            "missing: sampler",
            "extra: model.body.2.weight",
            "extra: optimizer",
            "extra: epoch",
        ):
            assert f"  {told}" in str(caught.value)
        assert "changed nothing" in str(caught.value) and "strict=False" in str(caught.value)
        same(other.model.state_dict(), before)
        other.model.body[0] = nn.Linear(6, 10)
        other.model.count = torch.zeros((), dtype=torch.int64)
        done = restoring.restore(state, strict=False)
    assert set(done.missing) == {"model.extra.weight", "model.extra.bias", "sampler"}
    assert {"optimizer", "epoch", "model.body.2.bias"} <= set(done.extra)
    assert torch.equal(other.model.body[0].weight, trained.model.body[0].weight.cpu())
    assert torch.equal(other.model.extra.weight, before["extra.weight"])


def test_parameters_that_come_go_and_move(tmp_path):
    def optimized(*names):
        torch.manual_seed(len(names))
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        optimizer = torch.optim.Adam(model.parameters())
        sum(layer(torch.ones(2)).sum() for layer in model.values()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    one, two = optimized("a", "b", "c"), optimized("c", "d", "a")
    kept = two["optimizer"].state[two["model"]["d"].weight]["exp_avg"].clone()
    one["optimizer"].state[one["model"]["c"].weight]["exp_avg"].fill_(7)
    with CheckpointManager(tmp_path) as saving:
        saving.save(0, one)
        done = saving.restore(two, strict=False)
    state = two["optimizer"].state
    assert (state[two["model"]["c"].weight]["exp_avg"] == 7).all()
    assert torch.equal(state[two["model"]["d"].weight]["exp_avg"], kept)
    assert {"model.d.weight", "optimizer.model.d.weight"} <= set(done.missing)
    assert {"model.b.weight", "optimizer.model.b.weight"} <= set(done.extra)


def test_another_dtype_on_request(tmp_path, mesh_1d):
    t = torch.linspace(0, 1, 9).to("xla")
    into = spmd.mark_sharding(torch.zeros(9, dtype=torch.bfloat16, device="xla"), mesh_1d, ("x",))
    with CheckpointManager(tmp_path) as saving:
        saving.save(0, {"t": {"t": t}})
        with pytest.raises(CheckpointError, match=r"float32 for torch.bfloat16; pass convert=True"):
            saving.restore({"t": {"t": into}})
        saving.restore({"t": {"t": into}}, convert=True)
        assert torch.equal(into.cpu(), t.cpu().bfloat16())
        with pytest.raises(
            CheckpointError, match=r"another dtype: t.t, torch.float32 for torch.int"
        ):
            saving.restore({"t": {"t": torch.zeros(9, dtype=torch.int32)}}, convert=True)


@pytest.mark.slow
@pytest.mark.one_device
def test_pipelines_and_plain_models_have_the_same_names(tmp_path, num_devices):
    def built(stages, *, scan=False):
        torch.manual_seed(stages)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))).to("xla")
        if stages > 1:
            mesh = spmd.Mesh(range(num_devices), (stages, num_devices // stages), ("pipe", "x"))
            spmd.pipeline(model, mesh, num_microbatches=2)
        if scan:
            spmd.scan_model(model, "")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer

    def trained(model, optimizer):
        for _ in range(2):
            model(torch.ones(8, 4, device="xla")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            spmd.sync()

    stages = [4, 2, 1] if num_devices % 4 == 0 else [1]
    runs = [built(n, scan=n == 1) for n in stages]
    with CheckpointManager(tmp_path) as saving:
        for step, (model, optimizer) in enumerate(runs):
            trained(model, optimizer)
            right = {name: t.cpu() for name, t in model.state_dict().items()}
            saving.save(step, {"model": model, "optimizer": optimizer})
            for other, its_optimizer in [*runs[:step], *runs[step + 1 :]]:
                saving.restore({"model": other, "optimizer": its_optimizer}, step)
                same({name: t.cpu() for name, t in other.state_dict().items()}, right)
                # The moments follow: what is saved from here is what was saved.
                saving.save(100 * step + 50 + len(saving.all_steps()),
                            {"model": other, "optimizer": its_optimizer})  # fmt: skip
                saving.wait()
                moments = [
                    store.Reader(tmp_path / str(s)).read(
                        "optimizer.model.2.0.weight.exp_avg", (slice(0, 4), slice(0, 4))
                    )
                    for s in (step, saving.latest())
                ]
                assert (moments[0] == moments[1]).all() and moments[0].any()


# --- Saves that rest ---------------------------------------------------------------------------


@pytest.fixture
def endless(monkeypatch):
    """Saves behind others rest for minutes, unless that is ended."""
    monkeypatch.setattr(pace, "_SHARE", 1e-9)
    monkeypatch.setattr(pace, "_PART", 1e9)


@pytest.mark.parametrize("ends", ["wait", "save", "close", "restore", "remove_after"])
def test_whoever_waits_ends_the_rests_of_a_save(tmp_path, endless, ends):
    t = torch.arange(50_000.0)
    start = time.monotonic()
    with CheckpointManager(tmp_path) as saving:
        for step in range(2):
            saving.save(step, {"t": t + step})
        time.sleep(0.2)
        assert saving.all_steps() == [0]
        calls = {
            "wait": saving.wait,
            "save": lambda: saving.save(2, {"t": t}),
            "close": saving.close,
            "restore": lambda: saving.restore({"t": torch.zeros(50_000)}, 1),
            "remove_after": lambda: saving.remove_after(1),
        }
        calls[ends]()
        assert saving.all_steps()[:2] == [0, 1]
    assert time.monotonic() - start < 30
    found = torch.zeros(50_000)
    load_checkpoint(tmp_path, {"t": found}, 1)
    assert torch.equal(found, t + 1)


def test_what_is_not_to_go_on_behind_the_program_never_rests(tmp_path, endless):
    with CheckpointManager(tmp_path, async_=False) as saving:
        for step in range(3):
            saving.save(step, {"t": torch.ones(50_000)})
            assert saving.latest() == step


AT_THE_END = """
import sys, torch
import spmd_core as spmd
from spmd_core.checkpoint import pace
spmd.config.cache_dir = None
spmd.simulate(1)
pace._SHARE, pace._PART = 1e-9, 1e9
manager = spmd.CheckpointManager(sys.argv[1])
for step in range(2):
    manager.save(step, {"t": torch.ones(50_000)})
assert manager.all_steps() == [0]
print("ended")
"""


def test_the_end_of_the_program_ends_the_rests_of_a_save(tmp_path):
    done = fresh.run(["-c", AT_THE_END, tmp_path], dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    found = torch.zeros(50_000)
    assert load_checkpoint(tmp_path, {"t": found}).step == 1 and (found == 1).all()


# --- Files and folders ----------------------------------------------------------------------------


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


# --- Ends -----------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch
import spmd_core as spmd
from spmd_core import counters
spmd.config.cache_dir = None  # jaxlib 0.10.0 writes of what it loads to stderr
spmd.simulate(8)
spmd.use_spmd()
from spmd_core.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1], keep=2)
w = spmd.mark_sharding(torch.zeros(64, 1000).to("xla"), spmd.Mesh(range(8), (8,), ("x",)), ("x",))
start = 0
if manager.latest() is not None:
    start = manager.restore({"w": w}).step
    assert (w.cpu() == start).all(), (start, w.cpu().unique())
print("from", start, flush=True)
for step in range(start + 1, start + 1 + int(sys.argv[2])):
    w += 1
    manager.save(step, {"w": w})
    print("after", step - 1, flush=True)  # which is whole: one save is in flight
"""


@pytest.mark.slow
def test_a_program_that_ends_without_close_has_its_last_step(tmp_path):
    for start in (0, 3):
        done = fresh.run(["-c", PROGRAM, tmp_path, 3], dict(os.environ))
        assert done.returncode == 0 and f"from {start}\n" in done.stdout, done.stderr
        assert not done.stderr
    assert sorted(int(n) for n in os.listdir(tmp_path) if n.isdecimal()) == [5, 6]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_has_whole_steps(tmp_path):
    last = 0
    for number in range(by_tier(3, in_all=6)):
        process = fresh.Process(["-c", PROGRAM, tmp_path, 10_000], dict(os.environ))
        said = process.until(lambda said, n=number: len(said.splitlines()) > 3 + 4 * n)
        said, errors = process.end()
        assert not errors, errors
        start = int(re.search(r"from (\d+)", said)[1])
        assert start >= last  # no step is lost that was said to be whole
        last = int(re.findall(r"after (\d+)", said)[-1])
    with CheckpointManager(tmp_path) as after:
        assert after.latest() >= last
        assert not [name for name in os.listdir(tmp_path) if lock.UNFINISHED in name]
