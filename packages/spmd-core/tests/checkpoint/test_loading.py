"""`load_checkpoint`: parts of a saved state, without a manager."""

import re

import pytest
import torch
from checkpoint_runs import make, same
from torch import nn

from spmd_core.checkpoint import CheckpointManager, load_checkpoint
from spmd_core.errors import CheckpointError


@pytest.mark.one_device
def test_a_part_is_loaded_while_the_run_goes_on(tmp_path, mesh_1d, mesh_2d):
    run = make(mesh_2d, ("a", "b"), ("b", "a"), (None, "a"))
    run.train(1)
    with CheckpointManager(tmp_path) as saving:
        saving.save(1, run.state(epoch=2))
        saving.wait()
        right = {name: t.cpu().clone() for name, t in run.model.state_dict().items()}
        run.train(1)
        saving.save(2, run.state(epoch=3))
        for other in (make(mesh_1d, (None, "x"), ("x",), seed=1), make(None, device="cpu", seed=2)):
            random = torch.get_rng_state()
            done = load_checkpoint(tmp_path, {"model": other.model, "epoch": 0}, 1)
            assert (done.step, done.state["epoch"], done.missing, done.extra) == (1, 2, [], [])
            same({name: t.cpu() for name, t in other.model.state_dict().items()}, right)
            assert not other.optimizer.state and torch.equal(torch.get_rng_state(), random)
        # The tensors themselves, by the names in the model.
        tensors = make(None, device="cpu", seed=3).model.state_dict(keep_vars=True)
        saving.wait()
        assert load_checkpoint(tmp_path, {"model": tensors}).step == 2
        same({n: t.detach() for n, t in tensors.items()},
             {n: t.cpu() for n, t in run.model.state_dict().items()})  # fmt: skip


def test_a_part_must_be_there_whole(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with CheckpointManager(tmp_path, async_=False) as saving:
        saving.save(0, {"model": model, "other": 1})
    less, more = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(*(nn.Linear(2, 2) for _ in "abc"))
    before = less[0].weight.detach().clone()
    for state, told in (
        ({"model": less}, "extra: model.1.weight"),
        ({"model": more}, "missing: model.2.weight"),
        ({"optimizer": 1}, "missing: optimizer"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"  {told}\n")) as caught:
            load_checkpoint(tmp_path, state)
        assert "other" not in str(caught.value)
    assert torch.equal(less[0].weight, before)
    with pytest.raises(CheckpointError, match=r"has no step 3\. Its steps are 0\. Restore one of"):
        load_checkpoint(tmp_path, {"model": model}, 3)
    with pytest.raises(CheckpointError, match=r"has no step\. Its steps are none\. Save one first"):
        load_checkpoint(tmp_path / "nothing", {"model": model})
    assert not (tmp_path / "nothing").exists()
