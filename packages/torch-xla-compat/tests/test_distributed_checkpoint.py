"""Tests torch_xla.experimental.distributed_checkpoint: planners, the manager, their errors.

The cases are those of PyTorch/XLA's own tests: save and load by torch.distributed.checkpoint,
between shardings, with and without planners.
"""

import dataclasses
import signal
import threading

import launched
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    _helpers,
    manager,
    prime_optimizer,
)

# Without a process group, where one process saves and loads.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def model(row, *specs, seed=0):
    """Two layers of sizes that nothing divides; the first's weight and the last's bias marked."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 9)).to("xla")
    for tensor, spec in zip((net[0].weight, net[2].weight, net[2].bias), specs):
        xs.mark_sharding(tensor, row, spec)
    return net


BY_ROWS = [("y", None), (None, "y"), ("y",)]
BY_COLUMNS = [(None, "y"), ("y", "x")]


def values(state):
    return {name: t.detach().cpu().clone() for name, t in state.items()}


def same(found, right):
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], t) for name, t in right.items())


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("with_planners", "on_cpu"),  # torch's own planner has no idea of copied blocks
    [
        ("both", False),
        ("both", True),
        ("save", False),
        ("save", True),
        ("load", False),
        ("", False),
    ],
)
def test_saved_by_one_sharding_and_loaded_by_another(tmp_path, row, with_planners, on_cpu):
    saved, right = model(row, *BY_ROWS), None
    right = values(saved.state_dict())
    state = saved.state_dict()
    if on_cpu:
        state = _helpers._sharded_cpu_state_dict(state)
        assert isinstance(state["0.weight"], _helpers._CpuShards) or row.size() == 1
    dist_cp.save(
        state,
        storage_writer=dist_cp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0),
        planner=SPMDSavePlanner() if with_planners in ("both", "save") else DefaultSavePlanner(),
        no_dist=True,
    )
    for specs in (BY_COLUMNS, BY_ROWS, []):
        other = model(row, *specs, seed=1)
        dist_cp.load(
            other.state_dict(),
            storage_reader=dist_cp.FileSystemReader(tmp_path),
            planner=SPMDLoadPlanner()
            if with_planners in ("both", "load")
            else DefaultLoadPlanner(),
            no_dist=True,
        )
        same(values(other.state_dict()), right)
        for tensor, spec in zip((other[0].weight, other[2].weight), specs):
            assert tensor.partition_spec == spec


def test_each_block_is_planned_once_and_copied_tensor_by_tensor(row, num_devices):
    net = model(row, *BY_ROWS)
    planner = SPMDSavePlanner()
    planner.set_up_planner({"model": net.state_dict(), "step": 3}, is_coordinator=True)
    plan = planner.create_local_plan()
    sharded = [item for item in plan.items if item.type is WriteItemType.SHARD]
    assert set(planner.sharded_state_dict) == {
        f"model.{n}" for n in ("0.weight", "2.weight", "2.bias")
    }
    assert set(planner.unsharded_state_dict) == {"model.0.bias", "step"}
    weight = net[0].weight.detach().cpu()
    (plan, *_), metadata = planner.create_global_plan([plan])
    planner.finish_plan(plan)
    found = torch.zeros_like(weight)
    for item in sharded:
        assert (
            item.tensor_data.size == net.state_dict()[item.index.fqn.removeprefix("model.")].shape
        )
        if item.index.fqn == "model.0.weight":
            block = planner.resolve_data(item)
            rows = slice(item.index.offset[0], item.index.offset[0] + block.shape[0])
            found[rows] += block
    assert torch.equal(found, weight)
    assert planner._blocks == {}  # nothing is kept of a tensor that was written
    with pytest.raises(AssertionError, match="WriteItem has already been processed"):
        planner.resolve_data(sharded[0])
    with pytest.raises(AssertionError, match="does not correspond to the correct shard"):
        planner.resolve_data(moved(sharded[0], (1, 1)))
    assert len(metadata.state_dict_metadata["model.0.weight"].chunks) <= num_devices


def moved(item, offset):
    """An item like this one that begins elsewhere."""
    index = dataclasses.replace(item.index, offset=torch.Size(offset))
    return dataclasses.replace(item, index=index)


def test_a_duplicate_name_is_refused(row):
    net = model(row)
    with pytest.raises(ValueError, match="duplicate"):
        SPMDSavePlanner().set_up_planner(
            {"a": {"b": net[0].weight}, "a.b": net[0].bias}, None, True
        )


def test_what_does_not_fit_is_refused(tmp_path, row):
    state = {"w": model(row, *BY_ROWS)[0].weight.detach(), "n": 3}
    metadata = dist_cp.save(state, checkpoint_id=tmp_path, planner=SPMDSavePlanner(), no_dist=True)
    marked = xs.mark_sharding(torch.zeros(4, 8).to("xla"), row, (None, "y"))
    for name, kind, told in (
        ("other", RuntimeError, "Missing key in checkpoint state_dict: other"),
        ("w", ValueError, r"Size mismatch between saved .*13, 5.* and current: .*4, 8.* for w"),
        ("n", ValueError, "Size mismatch between saved no tensor"),
    ):
        planner = SPMDLoadPlanner()
        planner.set_up_planner({name: marked}, metadata, True)
        with pytest.raises(kind, match=told):
            planner.create_local_plan()


def test_a_part_of_a_tensor_is_refused(tmp_path, row):
    net = model(row, *BY_ROWS)
    planner = SPMDLoadPlanner()
    metadata = dist_cp.save(
        {"w": net[0].weight.detach()},
        checkpoint_id=tmp_path,
        planner=SPMDSavePlanner(),
        no_dist=True,
    )
    metadata.state_dict_metadata["w"].chunks.pop()
    planner.set_up_planner({"w": net[0].weight.detach()}, metadata, True)
    with pytest.raises(ValueError, match=r"has \d+ of 65 elements of w that this process needs"):
        planner.create_local_plan()


def test_a_primed_optimizer_is_restored(tmp_path, row, group):
    def trained(steps, *specs):
        net = model(row, *specs)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(steps):
            net(torch.ones(4, 5, device="xla")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()
        return net, optimizer

    net, optimizer = trained(2, *BY_ROWS)
    chkpt = CheckpointManager(str(tmp_path), 10, chkpt_on_preemption=False)
    assert chkpt.save(0, {"model": net.state_dict(), "optim": optimizer.state_dict()})
    other, fresh = trained(0, *BY_COLUMNS)
    assert prime_optimizer(fresh) is fresh
    state = {"model": other.state_dict(), "optim": fresh.state_dict()}
    chkpt.restore(0, state)
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optim"])
    same(values(other.state_dict()), values(net.state_dict()))
    for mine, theirs in zip(fresh.state.values(), optimizer.state.values()):
        same(values(mine), values(theirs))
    assert fresh.state[other[0].weight]["exp_avg"].partition_spec == (None, "y")
    with pytest.raises(TypeError, match="optimizer"):
        prime_optimizer(net)


# --- The manager ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{}", "memory://{}"])
def test_steps_intervals_and_what_stays(tmp_path, row, group, place):
    path = place.format(tmp_path)
    net = model(row, *BY_ROWS)
    chkpt = CheckpointManager(path, 10, max_to_keep=2, chkpt_on_preemption=False)
    assert chkpt.all_steps() == [] and not chkpt.should_save(11) and chkpt.should_save(20)
    states = {}
    for step in (10, 15, 20, 30):
        with torch.no_grad():
            net[0].weight.add_(1)
        states[step] = values(net.state_dict())
        assert chkpt.save(step, net.state_dict()) == (step != 15)
    assert chkpt.save(35, net.state_dict(), force=True)
    assert chkpt.all_steps() == [30, 35]
    again = CheckpointManager(path, 10, chkpt_on_preemption=False)
    assert again.all_steps() == [30, 35]
    other = model(row, *BY_COLUMNS, seed=1)
    again.restore(30, other.state_dict())
    same(values(other.state_dict()), states[30])
    with pytest.raises(
        AssertionError, match=r"Cannot restore from untracked step 10. Valid .*30, 35"
    ):
        again.restore(10, other.state_dict())
    assert again.save(30, net.state_dict())  # replaces it, as the newest
    assert again.all_steps() == [35, 30]
    # What PyTorch/XLA's manager wrote marks a step, and is no JSON.
    mark = f"{again._root}/35/{manager._MARK}"
    again._files.pipe_file(mark, b"\x80\x04pickle")
    assert set(CheckpointManager(path, 1, chkpt_on_preemption=False).all_steps()) == {30, 35}


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path, row, group, monkeypatch):
    net = model(row, *BY_ROWS)
    chkpt = CheckpointManager(str(tmp_path), 1, max_pending_async=2, chkpt_on_preemption=False)
    going_on, save = threading.Event(), dist_cp.save
    monkeypatch.setattr(dist_cp, "save", lambda *a, **k: (going_on.wait(10), save(*a, **k)))
    right = values(net.state_dict())
    assert chkpt.save_async(0, net.state_dict())
    with torch.no_grad():
        net[0].weight.add_(1)
    assert chkpt.save_async(1, net.state_dict()) and chkpt.all_steps() == []
    going_on.set()
    chkpt.join()
    assert chkpt.all_steps() == [0, 1] and not CheckpointManager(
        str(tmp_path), 2, chkpt_on_preemption=False
    ).save_async(1, {})
    other = model(row, *BY_COLUMNS, seed=1)
    chkpt.restore(0, other.state_dict())
    same(values(other.state_dict()), right)


def test_a_background_save_that_fails_is_told(tmp_path, row, group, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    chkpt = CheckpointManager(str(tmp_path), 1, chkpt_on_preemption=False)
    with monkeypatch.context() as patch:
        patch.setattr(dist_cp, "save", full)
        chkpt.save_async(0, {"a": torch.ones(2)})
        with pytest.raises(OSError, match="No space left"):
            chkpt.join()
        chkpt.save_async(1, {"a": torch.ones(2)})
        chkpt._pending[0].exception()
        with pytest.raises(OSError, match="No space left"):
            chkpt.save_async(2, {"a": torch.ones(2)})
    assert chkpt.save(3, {"a": torch.ones(2)}) and chkpt.all_steps() == [3]


def test_a_preemption_saves_whatever_the_interval(tmp_path, group):
    chkpt = CheckpointManager(str(tmp_path), 1000)
    assert not chkpt.reached_preemption(7) and not chkpt.save(7, {"a": torch.ones(1)})
    signal.raise_signal(signal.SIGTERM)
    assert chkpt.save(8, {"a": torch.ones(1)}) and chkpt.reached_preemption(8)
    assert not chkpt.reached_preemption(9) and chkpt.all_steps() == [8]
    without = CheckpointManager(str(tmp_path), 1000, chkpt_on_preemption=False)
    with pytest.raises(AssertionError, match="this manager has False"):
        without.reached_preemption(9)


def test_arguments_that_are_refused(tmp_path, request):
    with pytest.raises(AssertionError, match="A process group is required"):
        CheckpointManager(str(tmp_path), 1)
    request.getfixturevalue("group")
    for wrong, told in (
        ({"save_interval": 0}, "save_interval must be positive; got 0"),
        ({"max_to_keep": -1}, "max_to_keep must be non-negative; got -1"),
        ({"max_pending_async": 0}, "max_pending_async must be positive"),
        ({"num_of_threads": 0}, "num_of_threads must be positive"),
    ):
        with pytest.raises(AssertionError, match=told):
            CheckpointManager(str(tmp_path), **{"save_interval": 1, **wrong})


PROGRAM = """
import sys
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(4)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import CheckpointManager
xr.use_spmd()
dist.init_process_group("gloo", init_method="xla://")
mesh = xs.Mesh(range(8), (4, 2), ("x", "y"))
right = torch.arange(11.0 * 6).reshape(11, 6)
saved = {"w": xs.mark_sharding(right.to("xla"), mesh, ("x", "y")), "b": right[0].to("xla")}
manager = CheckpointManager(folder, 2, max_to_keep=1)
assert not manager.save_async(1, saved)
assert manager.save_async(2, saved) and manager.save_async(4, saved)
manager.join()
assert manager.all_steps() == [4], manager.all_steps()
zeros = {"w": torch.zeros(11, 6).to("xla"), "b": torch.zeros(6).to("xla")}
xs.mark_sharding(zeros["w"], mesh, (None, ("y", "x")))
manager.restore(4, zeros)
assert torch.equal(zeros["w"].cpu(), right) and torch.equal(zeros["b"].cpu(), right[0])
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_two_processes_write_their_own_blocks(tmp_path, row, group):
    launched.succeed(2, lambda rank, port: ["-c", PROGRAM, tmp_path, port, rank])
    files = {path.name: path.stat().st_size for path in (tmp_path / "4").glob("*.distcp")}
    assert set(files) == {"__0_0.distcp", "__1_0.distcp"}
    found = xs.mark_sharding(torch.zeros(11, 6).to("xla"), row, ("y", None))
    CheckpointManager(str(tmp_path), 1, chkpt_on_preemption=False).restore(4, {"w": found})
    assert torch.equal(found.cpu(), torch.arange(11.0 * 6).reshape(11, 6))
