"""Two processes save together, and one restores; one saves, and two restore."""

import json

import launched
import pytest
import torch
from checkpoint_runs import make, same

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, lock

PROGRAM = """
import json, sys
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(4)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
spmd.use_spmd()
from checkpoint_runs import make
from spmd_core.checkpoint import CheckpointManager
from spmd_core.errors import CheckpointError
run = make(spmd.Mesh(range(8), (4, 2), ("a", "b")), ("a", "b"), ("b", "a"), (None, "a"))
with CheckpointManager(folder, keep=2) as manager:
    step = manager.restore(run.state()).step
    for number in range(step + 1, step + 4):
        losses = run.train(1)
        manager.save(number, run.state())
    manager.wait()
    assert manager.all_steps() == [step + 2, step + 3], manager.all_steps()
    try:
        manager.restore(run.state(), 99)
    except CheckpointError as error:
        assert "no step 99" in str(error)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(run.train(3), file)
"""


@pytest.mark.slow
def test_between_one_process_and_two(tmp_path, mesh_1d):
    first = make(mesh_1d, ("x",), (None, "x"))
    first.train(2)
    with CheckpointManager(tmp_path) as saving:
        saving.save(2, first.state())
    # On a mesh of one axis, what two processes do with two.
    losses = first.train(3), first.train(3)
    launched.succeed(2, lambda rank, port: ["-c", PROGRAM, tmp_path, port, rank])
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(losses[1], rel=1e-5)
    assert {path.name for path in (tmp_path / "5" / "arrays").glob("ocdbt.process_*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    onto_the_cpu, here = make(None, device="cpu", seed=7), make(mesh_1d, (None, "x"), seed=8)
    with CheckpointManager(tmp_path) as restoring:
        assert restoring.restore(onto_the_cpu.state()).step == 5
        random = torch.get_rng_state()
        restoring.restore(here.state())
    same(here.values(), onto_the_cpu.values())
    for run in (onto_the_cpu, here):
        torch.set_rng_state(random)
        assert run.train(3) == pytest.approx(losses[1], rel=1e-5)
    spmd.sync(wait=True)


FAILING = """
import sys, time
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
import spmd_core as spmd
spmd.config.cache_dir = None
spmd.simulate(4)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
spmd.use_spmd()
import torch
from spmd_core.checkpoint import CheckpointManager, database
from spmd_core.errors import CheckpointError
mesh = spmd.Mesh(range(8), (8,), ("x",))
t = spmd.mark_sharding(torch.arange(16.0).to("xla"), mesh, ("x",))
manager = CheckpointManager(folder)
manager.save(1, {"t": t})
manager.wait()
write = database.write

def full(*arguments):
    raise OSError(28, "No space left on device")

for step, failing in ((2, 1), (3, 0)):
    if rank == failing:
        database.write = full
    start = time.monotonic()
    manager.save(step, {"t": t})
    store_error = None
    try:
        manager.wait()
    except CheckpointError as error:
        store_error = str(error)
    database.write = write
    assert f"step {step} could not be written" in store_error, store_error
    assert "Earlier steps are as they were: 1. " in store_error, store_error
    assert "No space left on device" in store_error, store_error
    told = "got a failure of process"
    assert (told in store_error) == (rank != failing), store_error
    assert time.monotonic() - start < 30
manager.save(4, {"t": t})
manager.wait()
assert manager.all_steps() == [1, 4], manager.all_steps()
t.zero_()
assert manager.restore({"t": t}).step == 4
assert torch.equal(t.cpu(), torch.arange(16.0))
manager.close()
"""


@pytest.mark.slow
def test_a_failure_in_one_process_is_told_by_all(tmp_path):
    launched.succeed(2, lambda rank, port: ["-c", FAILING, tmp_path, port, rank])
    assert not [path for path in tmp_path.iterdir() if lock.UNFINISHED in path.name]
