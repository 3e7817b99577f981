"""Every parameter has a rule, and its spec fits the parameter's shape on every mesh."""

import pytest
import torch

import spmd_core as spmd
from examples.gpt2 import shardings
from examples.gpt2.model import build_model
from examples.gpt2.presets import PRESETS
from spmd_core.sharding.sharding import Sharding

MESHES = [
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=4",
    "data=4,tensor=2",
    "fsdp=4,tensor=2",
    "tensor=2,fsdp=4",
    "data=2,fsdp=2,tensor=2",
    "data=1,fsdp=8",
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(PRESETS["smoke"], vocab_size=512, dropout=0.0)


@pytest.mark.parametrize("axes", MESHES)
def test_every_parameter_divides_evenly_on_every_mesh(axes: str, model: torch.nn.Module) -> None:
    mesh = spmd.parse_mesh(axes, 8)
    for name, parameter in model.named_parameters():
        sharding = Sharding.of(mesh, shardings.parameter_spec(name, mesh), parameter.ndim)
        assert sharding.padded_shape(tuple(parameter.shape)) == tuple(parameter.shape), name


@pytest.mark.parametrize("axes", MESHES)
def test_matrices_are_split_over_all_parameter_axes(axes: str, model: torch.nn.Module) -> None:
    mesh = spmd.parse_mesh(axes, 8)
    expected = mesh.shape().get("fsdp", 1) * mesh.shape().get("tensor", 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "wpe" not in name:
            assert (
                Sharding.of(mesh, shardings.parameter_spec(name, mesh), 2).num_shards == expected
            ), name


def test_column_then_row_parallel() -> None:
    mesh = spmd.parse_mesh("fsdp=4,tensor=2", 8)
    specs = {
        "transformer.wte.weight": (("tensor", "fsdp"), None),
        "transformer.h.0.attn.c_attn.weight": ("fsdp", "tensor"),
        "transformer.h.0.attn.c_attn.bias": ("tensor",),
        "transformer.h.0.attn.c_proj.weight": (("tensor", "fsdp"), None),
        "transformer.h.11.mlp.c_fc.weight": ("fsdp", "tensor"),
        "transformer.h.11.mlp.c_proj.weight": (("tensor", "fsdp"), None),
        "transformer.h.11.mlp.c_proj.bias": (None,),
        "transformer.ln_f.weight": (None,),
    }
    assert {name: shardings.parameter_spec(name, mesh) for name in specs} == specs


def test_a_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(
        LookupError, match=r"got 'transformer\.h\.0\.moe\.weight', which matches none\. Add a rule"
    ):
        shardings.parameter_spec("transformer.h.0.moe.weight", spmd.parse_mesh("fsdp=8", 8))


@pytest.mark.parametrize(
    ("axes", "spec", "num_shards"),
    [
        ("data=8", ("data", None), 8),
        ("data=2,fsdp=4", (("data", "fsdp"), None), 8),
        ("fsdp=4,tensor=2", ("fsdp", None), 4),
        ("tensor=8", (None, None), 1),
    ],
)
def test_the_batch_is_split_over_data_and_fsdp(
    axes: str, spec: shardings.Spec, num_shards: int
) -> None:
    mesh = spmd.parse_mesh(axes, 8)
    assert shardings.batch_sharding(mesh).partition_spec == (None, *spec)
    assert shardings.num_batch_shards(mesh) == num_shards
