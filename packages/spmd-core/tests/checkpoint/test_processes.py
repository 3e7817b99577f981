"""Two processes save together, and one restores; one saves, and two restore."""

import json

import launched
import pytest
import torch
from checkpoint_runs import make, same

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager

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
