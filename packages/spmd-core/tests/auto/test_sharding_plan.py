"""auto/sharding_plan.py and auto/explained.py: a plan as a table, as code, and to a file."""

import re

import pytest
import torch
from auto_steps import training, words

import spmd_core as spmd
from spmd_core.auto.candidates import mesh_shapes
from spmd_core.auto.sharding_plan import ShardingPlan
from spmd_core.errors import AutoShardingError


@pytest.fixture(scope="module")
def found():
    """A plan that tests read and leave as it is."""
    model, batch = words(vocabulary=64, width=32, inner=128, batch=16)
    own = training(model.to("xla"), fused=True)
    return spmd.auto_shard(own.step, *(x.to("xla") for x in batch), candidates=0)


def is_split(row):
    return any(axes is not None for axes in row.spec)


def test_the_table_has_a_line_for_equal_layers(found):
    text = str(found)
    (line,) = [x for x in text.splitlines() if "up.weight" in x]
    assert line.startswith("Words.blocks.*.up.weight x2") and "[128, 32]" in line
    assert text.startswith("mesh ") and "input 0" in text and "modelled peak" in text


def test_the_code_marks_as_the_plan_did(found):
    model, batch = words(vocabulary=64, width=32, inner=128, batch=16)
    model.to("xla")
    exec(found.code(), {"spmd": spmd, "re": re, "torch": torch, "model": model})
    for row in found.parameters:
        parameter = model.get_parameter(row.name.partition(".")[2])
        if is_split(row):
            assert parameter.partition_spec == row.spec and parameter.sharding.mesh == found.mesh
        else:
            assert parameter.sharding is None
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, inputs, result, name=name: seen.update({name: result.partition_spec})
        )
    model(batch[0].to("xla"))
    assert {name: seen[name] for name in found.activations} == dict(found.activations)


def test_a_plan_is_kept_in_a_file(found, tmp_path):
    path = tmp_path / "plan.json"
    found.save(path)
    loaded = ShardingPlan.load(path)
    assert loaded.parameters == found.parameters and loaded.mesh == found.mesh
    assert loaded.code() == found.code()
    model, _ = words(vocabulary=64, width=32, inner=128)
    loaded.apply(model.to("xla"))
    for row in filter(is_split, loaded.parameters):
        assert model.get_parameter(row.name.partition(".")[2]).partition_spec == row.spec
    with pytest.raises(AutoShardingError, match=r"loaded from a file. Call auto_shard again"):
        loaded.explain("Words.table.weight")
    with pytest.raises(AutoShardingError, match=r"one without \['blocks.0.down.bias'"):
        loaded.apply(torch.nn.Linear(3, 3).to("xla"))
    path.write_text("{}")
    with pytest.raises(AutoShardingError, match=r"plan.json must hold a plan .*KeyError"):
        ShardingPlan.load(path)


def test_explanations(found):
    text = found.explain("Words.blocks.0.up.weight")
    assert text.startswith("Words.blocks.0.up.weight: ")
    if spmd.global_runtime_device_count() > 1:
        costs = [float(x.replace(",", "")) for x in re.findall(r"([+-][\d.,]+) ms", text)]
        assert len(costs) >= 2 and min(costs) >= -0.001  # nothing is better than what was chosen
    with pytest.raises(AutoShardingError, match=r"got 'Words.blocks.0.up'. Names like it: Words"):
        found.explain("Words.blocks.0.up")


def test_shapes_of_meshes():
    assert mesh_shapes(1) == ((1,),)
    assert mesh_shapes(6) == ((6,), (2, 3), (3, 2))
    assert (2, 2, 2) in mesh_shapes(8)
    assert (4, 8, 4) in mesh_shapes(128) and (4, 4, 8) not in mesh_shapes(128)
