"""The names of what a state holds, and states that have none."""

import pytest
import torch
from checkpoint_runs import make
from torch import nn

from spmd_core.checkpoint import entries
from spmd_core.checkpoint.entries import Named, has_rows, packed
from spmd_core.errors import CheckpointError


def test_names_of_tensors_and_of_an_optimizers_state():
    run = make(None, device="cpu")
    run.train(1)
    parts, arrays = packed(run.state())
    assert "model.embed.weight" in arrays.entries and "model.head.weight" not in arrays.entries
    assert parts["model"]["head.weight"]["name"] == "model.embed.weight"
    slot = parts["optimizer"]["state"]["model.body.0.bias"]["exp_avg"]
    assert slot["name"] == "optimizer.model.body.0.bias.exp_avg" and slot["shape"] == [10]
    group = parts["optimizer"]["groups"][1]
    assert group["params"] == ["model.body.0.bias", "model.body.2.bias", "model.head.bias"]
    assert group["options"]["initial_lr"] == 3e-3 and group["options"]["weight_decay"] == 0.0
    assert parts["optimizer"]["shapes"]["model.embed.weight"] == [7, 6]


def test_an_optimizer_without_its_module():
    layer = nn.Linear(2, 2)
    named = torch.optim.SGD(layer.named_parameters(), momentum=0.9)
    assert entries.optimizer_names("o", named, {}) == [[Named(("weight",)), Named(("bias",))]]
    plain = torch.optim.SGD(layer.parameters())
    assert entries.optimizer_names("o", plain, {}) == [[Named(("0",)), Named(("1",))]]
    state = {"model": nn.Linear(2, 2), "optimizer": plain}
    with pytest.raises(CheckpointError, match=r"got 2 of 'optimizer' that are in none: \[2"):
        packed(state)


@pytest.mark.parametrize("name", ["a/b", "..", "a.b", "", 3, "a b"])
def test_names_of_parts_that_are_refused(name):
    with pytest.raises(CheckpointError, match=r"names like those of Python's variables; got"):
        packed({name: 1})


@pytest.mark.parametrize(("state", "got"), [({}, "an empty one"), ([1], "list"), (None, "None")])
def test_what_is_no_state(state, got):
    with pytest.raises(CheckpointError, match=f"a dict of parts by name.*got {got}"):
        packed(state)


def test_a_slash_in_a_modules_name():
    model = nn.Module()
    model.add_module("a/b", nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"no slash, which is a folder's; got 'a/b\.weight'"):
        packed({"model": model})


def test_two_tensors_of_one_name():
    with pytest.raises(CheckpointError, match=r"got two for 't\.a\.b'\. Rename one of the keys"):
        packed({"t": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}})


@pytest.mark.parametrize(
    ("tensor", "what"),
    [(torch.empty(2, device="meta"), "of device meta"), (torch.eye(2).to_sparse(), "of layout")],
    ids=["meta", "sparse"],
)
def test_tensors_without_dense_values(tensor, what):
    with pytest.raises(CheckpointError, match=f"dense tensors with values; got one {what}"):
        packed({"t": tensor})


def test_rows_of_a_stacked_parameters_state():
    stacked = Named(("a", "b"), is_stacked=True)
    assert has_rows(stacked, torch.ones(2, 3)) and not has_rows(stacked, torch.ones(()))
    assert not has_rows(Named(("a",)), torch.ones(2)) and not has_rows(stacked, 3)
    with pytest.raises(CheckpointError, match=r"got shape \[3\] for the 2 stages of 'a'"):
        has_rows(stacked, torch.ones(3))
