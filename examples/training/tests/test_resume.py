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


@dataclass(frozen=True)
class Config:
    lr: float = knob(0.1, "learning rate")
    data: Sequence[str] = knob(("a",), "files")
    mesh: str = knob("", "mesh", resumable=True)


def parts(device: str, mesh: spmd.Mesh | None = None, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    if mesh is not None:
        spmd.mark_sharding(model[0].weight, mesh, ("x",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
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


def test_a_run_goes_on_where_it_was_on_any_mesh(tmp_path: Path, num_devices: int) -> None:
    path = tmp_path / "deep" / "run.pt"
    mesh = spmd.Mesh(range(num_devices), (num_devices,), ("x",))
    begun = parts("xla", mesh)
    train(begun, 3)
    save(path, begun, mesh="x=8")
    expected = train(begun, 3)
    for other in (mesh, None):
        resumed = parts("xla", other, seed=7)
        saved = resume.read(path, config=Config())
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
    resume.restore(resume.read(tmp_path / "run.pt", config=Config()), data="text", parts=resumed)
    assert train(resumed, 3) == expected


def test_another_option_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", parts("cpu"))
    resume.read(tmp_path / "run.pt", config=Config(mesh="x=8", data=["a"]))
    message = re.escape("got --lr 0.2, and 0.1 in") + ".*Pass --lr 0.1, or begin a new run"
    with pytest.raises(ResumeError, match=message):
        resume.read(tmp_path / "run.pt", config=Config(lr=0.2))


def test_a_run_from_before_an_option_existed_had_its_default(tmp_path: Path) -> None:
    save(tmp_path / "run.pt", parts("cpu"))
    state = torch.load(tmp_path / "run.pt")
    del state["config"]["lr"], state["config"]["data"]
    torch.save(state, tmp_path / "run.pt")
    resume.read(tmp_path / "run.pt", config=Config())
    with pytest.raises(ResumeError, match=r"got --lr 0\.2, and 0\.1 in"):
        resume.read(tmp_path / "run.pt", config=Config(lr=0.2))


def test_other_data_is_refused(tmp_path: Path) -> None:
    made = parts("cpu")
    save(tmp_path / "run.pt", made)
    saved = resume.read(tmp_path / "run.pt", config=Config())
    with pytest.raises(ResumeError, match=re.escape("(new text now, text then)")):
        resume.restore(saved, data="new text", parts=made)


@pytest.mark.parametrize("content", [None, b"", b"text", "state"])
def test_a_file_that_is_no_run(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "run.pt"
    if content == "state":
        torch.save({"weight": torch.ones(2)}, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ResumeError, match=r"--resume needs the file of a saved run; .* is none"):
        resume.read(path, config=Config())


def test_a_truncated_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    save(path, parts("cpu"))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ResumeError, match="--resume needs the file of a saved run"):
        resume.read(path, config=Config())


def test_a_file_of_another_format(tmp_path: Path) -> None:
    torch.save({"format": 99}, tmp_path / "run.pt")
    with pytest.raises(ResumeError, match=r"format 1; got format 99 .* Resume with the release"):
        resume.read(tmp_path / "run.pt", config=Config())


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
