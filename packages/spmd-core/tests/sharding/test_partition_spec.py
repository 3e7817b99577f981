"""Tests `PartitionSpec`: written as in jax, equal to the tuple, accepted wherever a tuple is."""

import copy
import pickle

import numpy as np
import pytest
import torch

import spmd_core as spmd
from spmd_core.sharding.partition_spec import validate_spec

SPECS = [(), ("fsdp",), ("fsdp", None), (None, ("fsdp", "tensor")), (0, -1)]
MESH = spmd.Mesh(range(8), (4, 2), ("fsdp", "tensor"))


@pytest.mark.parametrize("entries", SPECS)
def test_it_is_the_tuple_of_its_arguments(entries):
    spec = spmd.PartitionSpec(*entries)
    assert spec == entries and entries == spec and hash(spec) == hash(entries)
    assert isinstance(spec, tuple) and len(spec) == len(entries) and {entries: 1}[spec] == 1
    assert eval(repr(spec), {"PartitionSpec": spmd.PartitionSpec}) == spec
    assert validate_spec(MESH, spec) == validate_spec(MESH, entries)
    copies = [pickle.loads(pickle.dumps(spec, protocol)) for protocol in range(6)]
    for other in (*copies, copy.copy(spec), copy.deepcopy(spec)):
        assert other == spec and type(other) is spmd.PartitionSpec


def test_one_name_is_one_axis():
    assert spmd.PartitionSpec("fsdp") == ("fsdp",)  # not the letters of the name


@pytest.mark.parametrize("entries", [("a", "b"), (None, ("a", "b")), (("b", "a"),), ()])
def test_it_marks_as_the_tuple_does(entries, mesh_2d):
    spec = spmd.PartitionSpec(*entries)
    t, u = (torch.ones(16, 16, device="xla") for _ in range(2))
    assert (
        spmd.mark_sharding(t, mesh_2d, spec).sharding
        is spmd.mark_sharding(u, mesh_2d, entries).sharding
    )
    assert spmd.ShardingSpec(mesh_2d, spec) == spmd.ShardingSpec(mesh_2d, entries)
    net = torch.nn.Linear(16, 16, device="xla")
    assert spmd.shard_module(net, {"weight": spec, "bias": None}, mesh_2d).marked == {
        "weight": entries
    }
    spmd.constrain(t + 1, mesh_2d, spec)
    assert t.sum().item() == 256.0


@pytest.mark.parametrize("entry", [2.5, True, b"x", (2.5,), (("x",),), ("x", None), ..., {"x"}])
def test_an_entry_that_is_no_axis_is_refused_where_it_is_made(entry):
    with pytest.raises(
        spmd.errors.PartitionSpecError, match=r"an entry .*; got .*, of type .*Write for inst"
    ):
        spmd.PartitionSpec("y", entry)
    axes = ("fsdp", None, (0, "y"), -1, np.int64(2))
    assert spmd.PartitionSpec(*axes) == axes
