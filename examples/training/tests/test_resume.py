"""Saved runs: what comes back, on which devices, and what is refused."""

import json
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd_core as spmd
from examples.training import resume
from examples.training.batches import NumberedBatches
from examples.training.knobs import knob
from examples.training.resume import ResumeError, SaveError, Saves
from examples.training.run_config import RunConfig
from examples.training.schedule import lr_factor


@dataclass(frozen=True)
class Config(RunConfig):
    lr: float = knob(0.1, "learning rate")
    data: Sequence[str] = knob(("a",), "files", resumable=True)
    steps: int = knob(6, "steps", resumable=True)
    save_every: int = knob(1, "steps", resumable=True)


def parts_of(
    device: str, mesh: spmd.Mesh | None = None, seed: int = 0, num_steps: int = 6
) -> dict[str, Any]:
    torch.manual_seed(seed)
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Dropout(0.5)).to(device)
    if mesh is not None:
        spmd.mark_sharding(layer.weight, mesh, ("x",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, steps=num_steps, warmup=2, floor=0.1)
    )
    batches = NumberedBatches(lambda number: number, num_steps, batch=4)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}


def train(parts: dict[str, Any], num_steps: int) -> list[float]:
    device = parts["model"][0].weight.device
    losses = []
    for _, number in zip(range(num_steps), parts["batches"]):
        loss = parts["model"](torch.randn(4, 8).to(device)).square().sum() + number
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
        losses.append(loss.item())
    return losses


def saves_of(config: Config, parts: dict[str, Any], *, data: str = "text") -> Saves:
    return Saves(config, data=data, parts=parts)


def saved(config: Config, parts: dict[str, Any], *steps: int) -> None:
    with saves_of(config, parts) as saves:
        for step in steps:
            assert saves.save(step) == f"step {step:5d}  saved to {config.checkpoint}"


def resumed(config: Config, parts: dict[str, Any], *, data: str = "text") -> str:
    with saves_of(config, parts, data=data) as saves:
        return saves.restore(resume.step_of(config))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_a_run_goes_on_where_it_was_on_any_mesh(tmp_path: Path, num_devices: int) -> None:
    config = Config(checkpoint=str(tmp_path / "deep" / "run"))
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    begun = parts_of("xla", mesh)
    train(begun, 3)
    saved(config, begun, 3)
    begun["batches"].load_state_dict({"samples": 12})
    expected = train(begun, 3)
    for other in (mesh, None):
        made = parts_of("xla", other, seed=7)
        assert resumed(config, made) == "resume after step 3 of 6"
        state = made["optimizer"].state[made["model"][0].weight]["exp_avg"]
        assert state.sharding == made["model"][0].weight.sharding
        assert train(made, 3) == pytest.approx(expected, rel=1e-6)


def test_eager_torch_resumes_exactly(tmp_path: Path) -> None:
    config = Config(checkpoint=str(tmp_path))
    begun = parts_of("cpu")
    losses = train(begun, 3)
    saved(config, begun, 3)
    begun["batches"].load_state_dict(begun["batches"].state_dict())
    losses += train(begun, 3)
    whole = parts_of("cpu")
    assert train(whole, 6) == losses
    made = parts_of("cpu", seed=7)
    resumed(config, made)
    assert train(made, 3) == losses[3:]


def test_more_steps_follow_their_own_schedule(tmp_path: Path) -> None:
    config = Config(checkpoint=str(tmp_path), steps=12)
    begun = parts_of("cpu")
    train(begun, 3)
    saved(Config(checkpoint=str(tmp_path)), begun, 3)
    long = parts_of("cpu", num_steps=12)
    train(long, 3)
    made = parts_of("cpu", seed=7, num_steps=12)
    assert resumed(config, made) == (
        "resume after step 3 of 12; the saved run had 6 steps, and the learning rate decays over "
        "all: 9.78e-02 in the next one, in place of 8.68e-02"
    )
    for each in (made, long):
        assert each["optimizer"].param_groups[0]["lr"] == 0.1 * lr_factor(
            3, steps=12, warmup=2, floor=0.1
        )
    # Up to the third step the rates agree, so what was computed does, too.
    torch.testing.assert_close(made["model"][0].weight, begun["model"][0].weight, rtol=0, atol=0)


def test_it_goes_on_from_the_newest_step_or_a_named_one_or_begins(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path / "run"), keep=0), parts_of("cpu")
    assert resume.step_of(Config()) is resume.step_of(config) is None
    assert not Path(config.checkpoint).exists()  # it only looks
    with saves_of(Config(), made) as nothing:
        assert nothing.restore(None) == nothing.save_if_due(1) == nothing.save(1) == ""
        nothing.wait()
    begins = f"resume from no step: {config.checkpoint} has none yet, and a new run begins"
    assert resumed(config, made) == begins
    saved(config, made, 2, 4, 6)
    Path(config.checkpoint, "8").mkdir()  # of a process that was killed while it saved
    assert resume.step_of(config) == 6
    message = r"--resume names a step that is saved, or auto; got 3, and the steps .* are 2, 4, 6\."
    with pytest.raises(ResumeError, match=message):
        resume.step_of(Config(checkpoint=config.checkpoint, resume="3"))
    message = r"counts all steps of a run; got 5, and .* has done 6\. Pass for instance --steps 12"
    with pytest.raises(ResumeError, match=message):
        resume.step_of(Config(checkpoint=config.checkpoint, steps=5))
    named = Config(checkpoint=config.checkpoint, resume="4", keep=0)
    assert resumed(named, made) == "resume after step 4 of 6"
    Path(config.checkpoint, "8").rmdir()
    assert steps_in(Path(config.checkpoint)) == [2, 4]


def test_only_the_newest_steps_stay(tmp_path: Path) -> None:
    made = parts_of("cpu")
    with saves_of(Config(checkpoint=str(tmp_path), save_every=2, keep=2), made) as saves:
        said = [bool(saves.save_if_due(step)) for step in range(1, 8)]
    assert said == [False, True, False, True, False, True, False] and steps_in(tmp_path) == [4, 6]
    with saves_of(Config(checkpoint=str(tmp_path / "end"), save_every=0), made) as saves:
        assert not any(saves.save_if_due(step) for step in range(1, 8))


def test_another_option_is_named(tmp_path: Path) -> None:
    saved(Config(checkpoint=str(tmp_path)), parts_of("cpu"), 3)
    assert resume.step_of(Config(checkpoint=str(tmp_path), mesh="x=8", data=["b"])) == 3
    message = re.escape("got --lr 0.2, and 0.1 in") + ".*Pass --lr 0.1, or begin a new run"
    with pytest.raises(ResumeError, match=message):
        resume.step_of(Config(checkpoint=str(tmp_path), lr=0.2))


def test_a_run_from_before_an_option_existed_had_its_default(tmp_path: Path) -> None:
    config = Config(checkpoint=str(tmp_path))
    saved(config, parts_of("cpu"), 3)
    before = json.loads((tmp_path / "run.json").read_text())
    del before["lr"]
    (tmp_path / "run.json").write_text(json.dumps(before))
    assert resumed(config, parts_of("cpu")) == "resume after step 3 of 6"
    with pytest.raises(ResumeError, match=r"got --lr 0\.2, and 0\.1 in"):
        resume.step_of(Config(checkpoint=str(tmp_path), lr=0.2))


def test_other_data_is_refused(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path)), parts_of("cpu")
    saved(config, made, 3)
    message = r"has those of another: data: 'text' there, 'new text' here\. Name another folder"
    with pytest.raises(ResumeError, match=message):
        saves_of(config, made, data="new text")
    for broken in ("{", "[]"):
        (tmp_path / "run.json").write_text(broken)
        with pytest.raises(ResumeError, match=r"run\.json cannot be read: .*Name another folder"):
            resume.step_of(config)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path)), parts_of("cpu")
    with saves_of(config, made), pytest.raises(ResumeError, match="another, which is alive: proc"):
        saves_of(config, made)


def test_a_damaged_step_is_told_and_the_step_before_is_taken(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path)), parts_of("cpu")
    train(made, 2)
    right = made["model"][0].weight.detach().clone()
    saved(config, made, 2)
    train(made, 1)
    saved(config, made, 3)
    state = tmp_path / "3" / "state" / "metadata"
    state.write_text(state.read_text()[:-9])
    message = r"cannot go on from step 3: .*cannot be read.*Pass --resume 2 to go on from the step"
    with pytest.raises(ResumeError, match=message) as raised:
        resumed(config, made)
    assert "Traceback" not in str(raised.value)
    there = Config(checkpoint=str(tmp_path), resume="2")
    assert resumed(there, made) == "resume after step 2 of 6" and steps_in(tmp_path) == [2]
    assert torch.equal(made["model"][0].weight, right)
    (tmp_path / "2" / "state" / "metadata").unlink()
    with pytest.raises(ResumeError, match=r"To begin anew, name another folder\."):
        resumed(config, made)


def test_parts_that_do_not_fit_are_told(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path)), parts_of("cpu")
    train(made, 1)
    saved(config, made, 1)
    wider = made | {"model": nn.Sequential(nn.Linear(8, 9))}
    wider["optimizer"] = torch.optim.AdamW(wider["model"].parameters())
    with pytest.raises(ResumeError, match=r"another shape: model\.0\.weight, \[8, 8\] for \[9, 8"):
        resumed(config, wider)
    other = made | {"batches": NumberedBatches(lambda number: number, 6, batch=3)}
    with pytest.raises(
        ResumeError, match=r"step 1: a run goes on behind a whole batch; got 4 samples"
    ):
        resumed(config, other)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may become larger than this within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_the_earlier_step(tmp_path: Path) -> None:
    config, made = Config(checkpoint=str(tmp_path)), parts_of("cpu")
    saved(config, made, 1)
    with saves_of(config, made) as saves:
        with full_disk(1000):
            saves.save(2)
            message = r"step 2 could not be written .*Earlier steps are as they were: 1\. Free spa"
            with pytest.raises(SaveError, match=message):
                saves.save(3)
            saves.save(4)
            with pytest.raises(SaveError, match="step 4 could not be written"):
                saves.wait()
        saves.save(4)
    assert steps_in(tmp_path) == [1, 4]


def test_a_path_that_cannot_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    resume.check_writable(Config(checkpoint=str(tmp_path / "new")), {"--export": ""})
    assert [*(tmp_path / "new").iterdir()] == []
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        message = f"--checkpoint must name what can be written; got {str(path)!r}: "
        with pytest.raises(SaveError, match=re.escape(message)):
            resume.check_writable(Config(checkpoint=str(path)))
        with pytest.raises(SaveError, match=f"--checkpoint {path}"):
            saves_of(Config(checkpoint=str(path)), {})
    with pytest.raises(SaveError, match=r"--results must name what .* is a folder"):
        resume.check_writable(Config(results=str(tmp_path)))
    assert (tmp_path / "file").read_text() == "kept"
