"""Pickles do not depend on the package's layout: they name `spmd_core`, none of its modules."""

import io
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import spmd_core as spmd
from spmd_core.marks.module_rules import ShardingReport
from spmd_core.modules.einsum_linear import apply_einsum_linear
from spmd_core.sharding.sharding import Sharding, ShardingType
from spmd_core.tensor.shards import XLAShard

# Written by `torch.save` when the package was one flat folder. Never write it again.
WRITTEN = Path(__file__).parents[1] / "data" / "pickled.pt"
# Users import exceptions from `spmd_core.errors`, so this module keeps its place.
PUBLIC = {"spmd_core", "spmd_core.errors"}
MESH = spmd.Mesh(range(8), (4, 2), ("a", "b"))
WEIGHT = torch.arange(8.0).reshape(4, 2)


def modules_named(data):
    """The modules of this project that a pickle's opcodes name."""
    strings = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    return {text.split(" ")[0] for text in strings if text.startswith("spmd_core")}


def examples():
    return {
        "mesh": MESH,
        "sharding": Sharding.of(MESH, ("b", None), 2),
        "spec": spmd.ShardingSpec(MESH, ("a", None), minibatch=True),
        "type": ShardingType.PARTIAL,
        "op_sharding": MESH.get_op_sharding(("b",)),
        "shard": XLAShard(torch.ones(2), [slice(0, 2)], "CPU:0", 0),
        "report": ShardingReport(marked={"w": ("a",)}),
        "tensor": WEIGHT.to("xla"),
        "parameter": nn.Parameter(WEIGHT.to("xla")),
        "module": spmd.checkpoint_module(nn.Linear(2, 4).to("xla")),
        "einsum_linear": apply_einsum_linear(nn.Sequential(nn.Linear(2, 4))),
        **{
            name: error("text")
            for name, error in vars(spmd.errors).items()
            if isinstance(error, type) and issubclass(error, spmd.errors.SpmdError)
        },
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", examples())
def test_a_pickle_names_no_private_module(name, protocol):
    data = pickle.dumps(examples()[name], protocol=protocol)
    assert modules_named(data) <= PUBLIC
    pickle.loads(data)


def test_a_hybrid_mesh_names_no_private_module(num_devices):
    mesh = spmd.HybridMesh((num_devices,), (1,), ("x",))
    data = pickle.dumps(mesh)
    assert modules_named(data) == {"spmd_core"}
    assert pickle.loads(data) == mesh


def test_the_check_finds_a_private_module():
    assert modules_named(pickle.dumps(spmd.metrics.report)) == {"spmd_core.counters"}


def test_a_saved_file_names_no_private_module():
    data = io.BytesIO()
    torch.save(examples(), data)
    with zipfile.ZipFile(data) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
        assert modules_named(archive.read(name)) <= PUBLIC


def test_a_file_from_before_the_folders_is_read():
    found = torch.load(WRITTEN, weights_only=False)
    expected = examples()
    for name in ("mesh", "sharding", "spec", "type", "op_sharding", "report"):
        assert found[name] == expected[name] and type(found[name]) is type(expected[name])
    assert found["sharding"] is expected["sharding"]
    assert found["hybrid"] == spmd.Mesh(range(8), (8,), ("x",))
    assert found["shard"].data.tolist() == [1, 1] and found["shard"].indices == [slice(0, 2)]
    assert found["tensor"].device.type == "xla" and found["tensor"].tolist() == WEIGHT.tolist()
    assert isinstance(found["parameter"], nn.Parameter)
    assert found["parameter"].tolist() == WEIGHT.tolist()
    assert found["module"](torch.ones(1, 2, device="xla")).tolist() == [[4.0, 8.0, 12.0, 16.0]]
    assert isinstance(found["error"], spmd.errors.MeshError) and str(found["error"]) == "as it was"


def test_weights_are_read_without_trust():
    data = io.BytesIO()
    torch.save(nn.Linear(2, 4, device="xla").state_dict(), data)
    data.seek(0)
    assert torch.load(data, weights_only=True)["weight"].device.type == "xla"


def test_a_frozen_parameter_stays_frozen():
    for requires_grad in (True, False):
        parameter = nn.Parameter(WEIGHT.to("xla"), requires_grad=requires_grad)
        assert pickle.loads(pickle.dumps(parameter)).requires_grad is requires_grad
