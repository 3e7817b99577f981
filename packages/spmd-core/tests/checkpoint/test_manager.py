"""`CheckpointManager`: saved on one mesh, restored on others, and what differs."""

import math
import threading

import pytest
import torch
from checkpoint_runs import make, same
from torch import nn

import spmd_core as spmd
from spmd_core import counters
from spmd_core.checkpoint import (
    CheckpointManager,
    database,
    store,
)
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
