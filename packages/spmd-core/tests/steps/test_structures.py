"""Nested structures of tensors: moves to the host and to the device, and files."""

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import spmd_core as spmd
from spmd_core.steps import structures

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    x: torch.Tensor
    name: str


def test_every_structure_goes_to_the_cpu():
    x = torch.arange(4.0)
    data = {
        "a": [x.to("xla"), (x.to("xla"), 3)],
        "b": Pair(x.to("xla"), None),
        "c": Batch(x.to("xla"), "n"),
        "d": x,
        "e": {x.to("xla")},
    }
    host = structures.to_cpu(data)
    assert (
        type(host["b"]) is Pair
        and type(host["c"]) is Batch
        and type(host["a"][1]) is tuple
        and host["c"].name == "n"
    )
    for t in (host["a"][0], host["a"][1][0], host["b"].first, host["c"].x, *host["e"]):
        assert t.device.type == "cpu" and torch.equal(t, x)
    assert host["d"] is x and data["c"].x.device.type == "xla"


TENSORS = st.lists(st.integers(0, 3), max_size=3).map(
    lambda shape: torch.arange(float(math.prod(shape))).reshape(shape)
)
NESTED = st.recursive(
    TENSORS | st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(NESTED)
@settings(deadline=None)  # slow examples are no failure
def test_to_the_device_and_back(data):
    def same(a, b):
        if isinstance(a, torch.Tensor):
            return a.device == b.device and torch.equal(a, b)
        if isinstance(a, (list, tuple)):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        return a is b

    there = structures.send_to_device(data)
    assert all(
        t.device.type == "xla" for t in pytree.tree_leaves(there) if isinstance(t, torch.Tensor)
    )
    assert same(data, structures.to_cpu(there))


def test_a_state_dict_keeps_what_it_carries_and_ties_stay():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.to("xla")
    state = model.state_dict()
    host = structures.to_cpu(state)
    assert type(host) is OrderedDict and host._metadata == state._metadata
    assert host["0.weight"] is host["1.weight"] and host["0.bias"] is not host["1.bias"]


def test_parameters_and_leaves_stay_what_they_are():
    parameter, leaf = (
        nn.Parameter(torch.ones(2, device="xla")),
        torch.ones(2, device="xla", requires_grad=True),
    )
    frozen = nn.Parameter(torch.ones(2, device="xla"), requires_grad=False)
    a, b, c, d = structures.to_cpu([parameter, leaf, frozen, leaf * 2])
    assert (
        isinstance(a, nn.Parameter)
        and a.requires_grad
        and type(b) is torch.Tensor
        and b.requires_grad
    )
    assert isinstance(c, nn.Parameter) and not c.requires_grad and not d.requires_grad


def test_what_is_saved_is_read_by_plain_torch(tmp_path, mesh_1d, num_devices):
    model = nn.Linear(4, 2 * num_devices).to("xla")
    spmd.mark_sharding(model.weight, mesh_1d, ("x",))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4, device="xla")).sum().backward()
    optimizer.step()
    structures.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3},
        tmp_path / "state.pt",
    )
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert read["step"] == 3 and read["model"]["weight"].device.type == "cpu"
    assert torch.equal(read["model"]["weight"], model.weight.detach().cpu())
    assert torch.equal(
        read["optimizer"]["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"].cpu()
    )


def test_an_error_of_writing_is_raised(tmp_path):
    with pytest.raises((OSError, RuntimeError), match="missing"):
        structures.save(torch.ones(2, device="xla"), tmp_path / "missing" / "x.pt")


def test_one_sharding_fits_every_rank(mesh_1d, num_devices):
    spec = spmd.ShardingSpec(mesh_1d, ("x", None, None, None))
    images, labels = torch.randn(2 * num_devices, 3, 4, 4), torch.arange(2 * num_devices)
    batch = (images, [labels, torch.tensor(1.0)], "name")
    sent = structures.send_to_device(batch, spec)
    assert type(sent) is tuple and sent[2] == "name"
    assert (
        sent[0].partition_spec == ("x", None, None, None)
        and sent[1][0].partition_spec == ("x",)
        and sent[1][1].sharding is None
    )
    assert (
        torch.equal(sent[0].cpu(), images)
        and torch.equal(sent[1][0].cpu(), labels)
        and sent[1][1].item() == 1
    )
    plain = structures.send_to_device(batch)
    assert plain[0].device.type == "xla" and plain[0].sharding is None
