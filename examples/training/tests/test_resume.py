"""Saved runs: what comes back, on which devices, and what is refused."""

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
from examples.training.knobs import knob
from examples.training.resume import ResumeError, SaveError
from examples.training.run_config import RunConfig
from examples.training.schedule import lr_factor


@dataclass(frozen=True)
class Config(RunConfig):
    lr: float = knob(0.1, "learning rate")
    data: Sequence[str] = knob(("a",), "files")
    steps: int = knob(6, "steps", resumable=True)


def parts(
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
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(parts: dict[str, Any], num_steps: int) -> list[float]:
    device = parts["model"][0].weight.device
    losses = []
    for _ in range(num_steps):
        loss = parts["model"](torch.randn(4, 8).to(device)).square().sum()
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
        losses.append(loss.item())
    return losses


def save(path: Path, saved: dict[str, Any], **options: Any) -> None:
    resume.save(path, step=3, config=Config(**options), data="text", parts=saved)


def read(path: Path, **options: Any) -> dict[str, Any]:
    saved = resume.read(Config(**options, resume=str(path)))
    assert saved is not None
    return saved


def test_a_run_goes_on_where_it_was_on_any_mesh(tmp_path: Path, num_devices: int) -> None:
    path = tmp_path / "deep" / "run.pt"
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    begun = parts("xla", mesh)
    train(begun, 3)
    save(path, begun, mesh="x=8")
    expected = train(begun, 3)
    for other in (mesh, None):
        resumed = parts("xla", other, seed=7)
        saved = read(path)
        assert resume.restore(saved, data="text", parts=resumed) == 3
        state = resumed["optimizer"].state[resumed["model"][0].weight]["exp_avg"]
        assert state.sharding == resumed["model"][0].weight.sharding
        assert train(resumed, 3) == pytest.approx(expected, rel=1e-6)
    assert torch.load(path, weights_only=True)["step"] == 3


def test_eager_torch_resumes_exactly(tmp_path: Path) -> None:
    begun = parts("cpu")
    train(begun, 3)
    save(tmp_path / "run.pt", begun)
    expected = train(begun, 3)
    resumed = parts("cpu", seed=7)
    resume.restore(read(tmp_path / "run.pt"), data="text", parts=resumed)
    assert train(resumed, 3) == expected


def test_more_steps_follow_their_own_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    begun = parts("cpu")
    train(begun, 3)
    save(path, begun)
    long = parts("cpu", num_steps=12)
    train(long, 2)
    schedule = [group["lr"] for group in long["optimizer"].param_groups]
    assert schedule == [0.1]  # up to here, both are warm-up
    train(long, 1)
    resumed = parts("cpu", seed=7, num_steps=12)
    saved = read(path, steps=12)
    resume.restore(saved, data="text", parts=resumed)
    for made in (resumed, long):
        assert made["optimizer"].param_groups[0]["lr"] == 0.1 * lr_factor(
            3, steps=12, warmup=2, floor=0.1
        )
    lr = resumed["scheduler"].get_last_lr()[0]
    line = resume.said(Config(steps=12), saved, lr=lr)
    assert line == (
        "resume after step 3 of 12; the saved run had 6 steps, and the learning rate decays over "
        "all: 9.78e-02 in the next one, in place of 8.68e-02"
    )
    assert resume.said(Config(), saved, lr=lr) == "resume after step 3 of 6"
    # Up to the third step the rates agree, so what was computed does, too.
    torch.testing.assert_close(resumed["model"][0].weight, begun["model"][0].weight, rtol=0, atol=0)
    message = r"counts all steps of a run; got 2, and .* has done 3\. Pass for instance --steps 6"
    with pytest.raises(ResumeError, match=message):
        read(path, steps=2)
    assert read(path, steps=3)["step"] == 3


def test_auto_goes_on_from_the_newest_file_or_begins(tmp_path: Path) -> None:
    def found(checkpoint: str) -> int | None:
        saved = resume.read(Config(checkpoint=f"{tmp_path}/{checkpoint}", resume="auto"))
        return None if saved is None else saved["step"]

    config = Config(checkpoint="run.pt", resume="auto")
    assert "run.pt is not there yet, and a new run begins" in resume.said(config, None, lr=0.1)
    assert found("run.pt") is found("new/run-{step}.pt") is None
    made = parts("cpu")
    for step in (9, 10, 2):
        resume.save(
            tmp_path / f"run-{step}.pt", step=step, config=Config(steps=10), data="", parts=made
        )
    (tmp_path / "run-11.pt.1.part").touch()  # of a process that was killed while it saved
    assert resume.newest(f"{tmp_path}/run-{{step}}.pt") == tmp_path / "run-10.pt"
    with pytest.raises(ResumeError, match="got 6, and"):
        found("run-{step}.pt")
    save(tmp_path / "run.pt", made)
    assert found("run.pt") == 3
    # What is there and is no run is not passed over.
    (tmp_path / "run-12.pt").touch()
    with pytest.raises(ResumeError, match="is none"):
        found("run-{step}.pt")


def test_another_option_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", parts("cpu"))
    read(tmp_path / "run.pt", mesh="x=8", data=["a"])
    message = re.escape("got --lr 0.2, and 0.1 in") + ".*Pass --lr 0.1, or begin a new run"
    with pytest.raises(ResumeError, match=message):
        read(tmp_path / "run.pt", lr=0.2)


def test_a_run_from_before_an_option_existed_had_its_default(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", parts("cpu"))
    state = torch.load(tmp_path / "run.pt")
    del state["config"]["lr"], state["config"]["data"]
    torch.save(state, tmp_path / "run.pt")
    read(tmp_path / "run.pt")
    with pytest.raises(ResumeError, match=r"got --lr 0\.2, and 0\.1 in"):
        read(tmp_path / "run.pt", lr=0.2)


def test_other_data_is_refused(tmp_path: Path) -> None:
    made = parts("cpu")
    save(tmp_path / "run.pt", made)
    saved = read(tmp_path / "run.pt")
    with pytest.raises(ResumeError, match=re.escape("(new text now, text then)")):
        resume.restore(saved, data="new text", parts=made)


@pytest.mark.parametrize("content", [None, b"", b"text", "state"])
def test_a_file_that_is_no_run(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "run.pt"
    if content == "state":
        torch.save({"weight": torch.ones(2)}, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(
        ResumeError, match=r"file of a saved run; .* is none: .*--resume auto begins a run"
    ):
        read(path)


def test_a_truncated_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save(path, parts("cpu"))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ResumeError, match="--resume needs the file of a saved run"):
        read(path)


def test_a_file_of_another_format(tmp_path: Path) -> None:
    torch.save({"format": 99}, tmp_path / "run.pt")
    with pytest.raises(ResumeError, match=r"format 1; got format 99 .* Resume with the release"):
        read(tmp_path / "run.pt")


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


def test_a_full_disk_keeps_the_earlier_file(tmp_path: Path) -> None:
    path, made = tmp_path / "run.pt", parts("cpu")
    with full_disk(1000), pytest.raises(SaveError, match="must fit on the disk") as first:
        save(path, made)
    assert "earlier step is kept" not in str(first.value)
    save(path, made)
    content = path.read_bytes()
    with full_disk(1000), pytest.raises(SaveError, match="The file of an earlier step is kept"):
        save(path, made)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
