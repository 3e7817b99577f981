"""Steps become safetensors and torch files and come back, in the words of those who read them."""

import json
import os

import fresh
import pytest
import torch
from checkpoint_runs import make, same
from safetensors.torch import load_file, save_file
from torch import nn

import spmd_core as spmd
from spmd_core.checkpoint import CheckpointManager, command


@pytest.fixture
def trained(tmp_path, mesh_2d):
    """A run of two steps, saved as step 2."""
    run = make(mesh_2d, ("a", "b"), ("b", "a"), (None, "a"))
    run.train(2)
    with CheckpointManager(tmp_path / "runs", async_=False) as saving:
        saving.save(2, run.state(epoch=3, bounds=(1.5, None)))
    return run


def convert(*arguments):
    return command.main(["convert", *map(str, arguments)])


def test_to_safetensors_and_back(tmp_path, trained, mesh_1d, capsys):
    path = tmp_path / "model.safetensors"
    assert convert(tmp_path / "runs", path) == 0
    assert f"step 2: {tmp_path}/runs -> {path}" in capsys.readouterr().out
    right = {n: t.cpu() for n, t in trained.model.state_dict().items() if n != "head.weight"}
    same(load_file(path), right)  # of a tied weight, one name
    other = make(mesh_1d, ("x",), (None, "x"), seed=1)
    spmd.load_safetensors(other.model, path)
    same({n: t.cpu() for n, t in other.model.state_dict().items() if n in right}, right)
    assert convert(path, tmp_path / "others", "--step", 7) == 0
    third = make(mesh_1d, (None, "x"), seed=2)
    with CheckpointManager(tmp_path / "others") as restoring:
        assert restoring.restore({"model": third.model}).step == 7
    same({n: t.cpu() for n, t in third.model.state_dict().items() if n in right}, right)
    with CheckpointManager(tmp_path / "runs") as saving:
        saving.save(4, {"t": {"one": torch.ones(()), "none": torch.ones(0, 2)}, "b": [True]})
    assert convert(tmp_path / "runs", tmp_path / "t.safetensors", "--part", "t") == 0
    same(load_file(tmp_path / "t.safetensors"), {"one": torch.ones(()), "none": torch.ones(0, 2)})


def test_to_a_torch_file_and_back(tmp_path, trained, mesh_1d):
    """Eager torch trains on from it, and so does another mesh from what comes back."""
    path = tmp_path / "run.pt"
    assert convert(tmp_path / "runs", path) == 0
    found = torch.load(path, weights_only=True)
    assert found["epoch"] == 3 and found["bounds"] == (1.5, None) and "random" not in found
    eager = make(None, device="cpu", seed=1)
    for name in ("model", "optimizer", "scheduler"):
        getattr(eager, name).load_state_dict(found[name])
    names = [n for g in found["optimizer"]["param_groups"] for n in g["param_names"]]
    assert "body.0.weight" in names and len(names) == len(found["optimizer"]["state"])
    same(eager.values(), trained.values())
    assert found["model"]["head.weight"] is not None
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert convert(path, tmp_path / "back") == 0
    del found["optimizer"]["param_groups"][0]["param_names"]
    del found["optimizer"]["param_groups"][1]["param_names"]
    torch.save(found, path)
    assert convert(path, tmp_path / "back", "--step", 1) == 0  # by positions
    with CheckpointManager(tmp_path / "back") as restoring:
        for step in (0, 1):
            run = make(mesh_1d, ("x",), (None, "x"), seed=3)
            done = restoring.restore(run.state(epoch=0, bounds=None), step)
            assert done.state["epoch"] == 3 and done.state["bounds"] == (1.5, None)
            same(run.values(), trained.values())
    assert convert(tmp_path / "back", path, "--part", "model", "--step", 1) == 0
    assert set(torch.load(path, weights_only=True)) == {"model"}


def test_a_flat_torch_file_is_a_model(tmp_path):
    right = {"a.w": torch.rand(3, 5), "b": torch.arange(4).bool()}
    torch.save(right, tmp_path / "model.pth")
    assert convert(tmp_path / "model.pth", tmp_path / "runs", "--part", "weights") == 0
    found = {name: torch.zeros_like(t) for name, t in right.items()}
    with CheckpointManager(tmp_path / "runs") as restoring:
        restoring.restore({"weights": found})
    same(found, right)


def test_what_cannot_be_converted(tmp_path, trained, capsys):
    def refused(*arguments):
        assert convert(*arguments) == 1
        return capsys.readouterr().err

    runs, out = tmp_path / "runs", tmp_path / "out.safetensors"
    assert "has no part 'm', but model, optimizer, sch" in refused(runs, out, "--part", "m")
    assert "the part 'epoch' has none by name" in refused(runs, out, "--part", "epoch")
    assert "has no step 9" in refused(runs, out, "--step", 9)
    assert not out.exists()
    text = refused(tmp_path / "model", tmp_path / "there")
    assert "one of the two is a file whose name ends with one of .safetensors," in text
    for content, told in (
        (b"nothing", "was written by torch.save as a zip"),
        (None, "Weights only load failed"),
        ([1], "got list in"),
    ):
        path = tmp_path / "file.pt"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(nn.Linear(1, 1) if content is None else content, path)
        assert told in refused(path, tmp_path / "new")
    assert "neither. Check the path" in refused(tmp_path / "no.safetensors", tmp_path / "new")
    assert "has step 2" in refused(_with_step(tmp_path), runs, "--step", 2)
    with CheckpointManager(tmp_path / "wide", async_=False) as saving:
        saving.save(0, {"model": {"z": torch.ones(2, dtype=torch.complex128)}})
    assert "got torch.complex128 of 'z'. Convert to a t" in refused(tmp_path / "wide", out)


def test_a_dtype_that_torch_lacks_is_refused(tmp_path, capsys):
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert convert(path, tmp_path / "runs") == 1
    assert "dtypes are torch's; got F8_E8M0 of 'w'" in capsys.readouterr().err


def _with_step(folder):
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    return folder / "one.safetensors"


def test_the_state_of_an_optimizer_by_names_by_positions_or_by_neither(tmp_path, mesh_1d):
    def built(named):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to("xla")
        spmd.mark_sharding(model[0].weight, mesh_1d, ("x",))
        given = model.named_parameters() if named else model.parameters()
        return model, torch.optim.Adam(given)

    def moments(optimizer):
        return {str(i): s["exp_avg"].cpu() for i, s in enumerate(optimizer.state.values())}

    model, optimizer = built(named=True)
    model(torch.ones(4, 3, device="xla")).sum().backward()
    optimizer.step()
    positional = optimizer.state_dict()
    for group in (positional := {**positional})["param_groups"]:
        del group["param_names"]
    with CheckpointManager(tmp_path, async_=False) as manager:
        for step, part in enumerate((optimizer, optimizer.state_dict(), positional)):
            manager.save(step, {"model": model, "optimizer": part})
        for step in range(3):
            other, its_own = built(named=step == 1)
            manager.restore({"model": other, "optimizer": its_own}, step)
            same(moments(its_own), moments(optimizer))
            # Into a state dict, which has no names, and beside the model's state dict.
            third, fresh_one = built(named=step == 2)
            state = {"model": third.state_dict(), "optimizer": fresh_one.state_dict()}
            fresh_one.load_state_dict(manager.restore(state, step).state["optimizer"])
            same(moments(fresh_one), moments(optimizer))
        bigger = nn.Sequential(model, nn.Linear(1, 1))
        adam = torch.optim.Adam(bigger.parameters())
        told = r"by positions on one side, .*\[4\] parameters for \[6\]; save the optimizer itself"
        with pytest.raises(spmd.errors.CheckpointError, match=told):
            manager.restore({"model": bigger, "optimizer": adam}, 2, strict=False)


@pytest.mark.exhaustive
def test_the_command_by_itself(tmp_path):
    torch.save({"w": torch.rand(64, 64)}, tmp_path / "w.pt")
    done = fresh.run(
        ["-m", "spmd_core.checkpoint", "convert", tmp_path / "w.pt", tmp_path / "runs"],
        dict(os.environ),
    )
    assert done.returncode == 0 and "step 0: " in done.stdout, done.stderr
    assert convert(tmp_path / "runs", tmp_path / "w.safetensors") == 0
    same(load_file(tmp_path / "w.safetensors"), torch.load(tmp_path / "w.pt", weights_only=True))
