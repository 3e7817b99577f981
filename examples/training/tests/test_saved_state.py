"""A wrong entry of a saved run is named in a sentence, and damage is never another state."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.training import resume
from examples.training.resume import ResumeError
from examples.training.tests.test_resume import Config, parts, read, save, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run.pt"
    begun = parts("cpu")
    train(begun, 3)
    save(path, begun)
    return path


def edited(whole: Path, path: Path, place: str, value: Any) -> None:
    """Writes the run with another value at a place; `...` removes it."""
    saved = torch.load(whole, weights_only=True)
    *outer, last = [int(word) if word.isdigit() else word for word in place.split("/")]
    inner = saved
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    torch.save(saved, path)


def restored(path: Path) -> dict[str, Any]:
    made = parts("cpu", seed=7)
    saved = read(path)
    resume.restore(saved, data="text", parts=made)
    return made


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("step", ..., "step is missing"),
        ("step", -1, "step must be at least 0; got -1"),
        ("step", 1.5, "step must be of type int; got float"),
        ("step", True, "step must be of type int; got bool"),
        ("config", [], "config must be of type dict; got list"),
        ("config", {3: 4}, "config must be a dict whose keys are names; got dict"),
        ("data", 3, "data must be of type str; got int"),
        ("random", torch.ones(3), "random must be the state of torch's generator"),
        ("random", torch.zeros(7, dtype=torch.uint8), "random must be the state of torch's"),
        ("parts", ..., "parts is missing"),
        ("parts/model", ..., "parts.model is missing"),
        ("parts/model", [], "parts.model must be a dict whose keys are names; got list"),
        ("parts/model/0.bias", ..., "parts.model.0.bias is missing"),
        (
            "parts/model/0.bias",
            torch.ones(9),
            "parts.model.0.bias must have the shape [8]; got [9",
        ),
        ("parts/model/0.bias", torch.ones(8, dtype=torch.int64), "0.bias must be of torch.float32"),
        ("parts/model/0.bias", [1.0], "parts.model.0.bias must be of type Tensor; got list"),
        ("parts/model/1.bias", torch.ones(8), "parts.model.1.bias is nothing that this run has"),
        ("parts/optimizer/state", {}, "state must have what 3 steps have gathered; got no param"),
        ("parts/optimizer/state", ..., "parts.optimizer.state is missing"),
        ("parts/optimizer/state", [1], "parts.optimizer.state must be of type dict; got list"),
        ("parts/optimizer/state/0", {}, "parts.optimizer.state.1 must have the entries of the oth"),
        ("parts/optimizer/state/0", 5, "parts.optimizer.state.0 must be a dict whose keys ar"),
        ("parts/optimizer/state/7", {}, "state.7 is of no parameter; the optimizer has 2"),
        ("parts/optimizer/state/1/exp_avg", ..., "parts.optimizer.state.1 must have the entri"),
        (
            "parts/optimizer/state/1/exp_avg",
            torch.ones(3),
            "must have the parameter's shape [8]",
        ),
        ("parts/optimizer/param_groups", [], "param_groups must have 1 items; got 0"),
        ("parts/optimizer/param_groups/0/lr", "x", "param_groups.0.lr must be of type float or in"),
        ("parts/optimizer/param_groups/0/params", [0], "groups.0.params must have 2 items; got 1"),
        ("parts/scheduler/last_epoch", -3, "parts.scheduler.last_epoch must be at least 0; got -3"),
        ("parts/scheduler/last_epoch", ..., "parts.scheduler.last_epoch is missing"),
        ("parts/scheduler/base_lrs", [0.1, 0.2], "parts.scheduler.base_lrs must have 1 items; got"),
    ],
)
def test_a_wrong_entry_is_named(
    whole: Path, tmp_path: Path, place: str, value: Any, message: str
) -> None:
    path = tmp_path / "run.pt"
    edited(whole, path, place, value)
    with pytest.raises(ResumeError) as raised:
        restored(path)
    assert message in str(raised.value) and "Traceback" not in str(raised.value)
    assert "Name the file that the run wrote, or leave out --resume." in " ".join(
        str(raised.value).split()
    )
    edited(whole, path, "step", 3)  # the file that the run wrote
    restored(path)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_damage_is_never_another_state(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 5]), label="flips")):
            bit = data.draw(st.integers(0, len(content) * 8 - 1))
            content[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "run.pt"
    path.write_bytes(content)
    right = torch.load(whole, weights_only=True)
    found = copy.deepcopy(right)
    try:
        found = read(path)
    except ResumeError as error:
        message = str(error)
    else:
        message = str(path)
    assert str(path) in message and same(found, right)


def test_a_path_that_cannot_be_written_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    resume.check_writable(Config(checkpoint=str(tmp_path / "new" / "run.pt")), {"--export": ""})
    for path, cause in ((tmp_path / "file" / "run.pt", "file"), (tmp_path, "is a folder")):
        message = f"--checkpoint must name what can be written; got {str(path)!r}: .*{cause}.*"
        with pytest.raises(resume.SaveError, match=re.escape(message).replace(r"\.\*", ".*")):
            resume.check_writable(Config(checkpoint=str(path)))
    with pytest.raises(resume.SaveError, match=r"must be written to a file; /dev/null could not"):
        save(Path("/dev/null"), parts("cpu"))
    assert Path("/dev/null").is_char_device() and (tmp_path / "file").read_text() == "kept"
