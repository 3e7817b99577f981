"""The fully-sharded wrapper module: attributes, wrap policies, and which outputs are marked."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from fsdp_models import Block, D, Returning, check
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import spmd_core as spmd
from spmd_core.modules.fsdp_unit import unit_of
from spmd_core.modules.fully_shard import SpmdFullyShardedDataParallel, fully_shard
from spmd_core.modules.wrap_policies import always_wrap_policy, size_based_auto_wrap_policy


@pytest.fixture
def mesh(num_devices):
    return spmd.Mesh(range(num_devices), (num_devices,), ("fsdp",))


def test_the_wrapper_forwards_names_indices_and_its_mesh(mesh):
    spmd.set_global_mesh(mesh)
    try:
        wrapped = SpmdFullyShardedDataParallel(nn.Sequential(nn.Linear(D, D), Block()))
    finally:
        spmd.set_global_mesh(None)
    assert (
        wrapped[1] is wrapped.module[1]
        and len(wrapped) == 2
        and wrapped[1].up.weight.sharding is not None
    )
    assert wrapped[0].in_features == D
    assert list(wrapped.state_dict()) == [
        f"module.{name}" for name in nn.Sequential(nn.Linear(D, D), Block()).state_dict()
    ]
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = wrapped.nothing_of_that_name
    x = torch.randn(16, D, device="xla")
    assert wrapped(x).partition_spec == ("fsdp", None)


def test_auto_wrapped_modules_have_every_option(hybrid):
    policy = ModuleWrapPolicy({Block})
    model = nn.Sequential(Block(), nn.Linear(D, D))
    wrapped = SpmdFullyShardedDataParallel(
        model,
        hybrid,
        auto_wrap_policy=policy,
        extra_data_axis="replicate",
        reshard_after_forward=False,
    )
    inner = wrapped[0]
    assert isinstance(inner, SpmdFullyShardedDataParallel) and not isinstance(
        wrapped[1], SpmdFullyShardedDataParallel
    )
    units = [unit_of(inner.module), unit_of(wrapped.module)]
    assert units[0].layout == units[1].layout and units[0].layout.batch_axes == (0, 1)
    assert not units[0].reshard_after_forward
    assert inner(torch.randn(16, D, device="xla")).partition_spec == (("replicate", "fsdp"), None)
    made = []

    def wrapper(module, mesh, **options):
        made.append((type(module), mesh, options["extra_data_axis"]))
        return fully_shard(module, mesh, **options)

    SpmdFullyShardedDataParallel(
        nn.Sequential(Block()),
        hybrid,
        auto_wrap_policy=policy,
        auto_wrapper_callable=wrapper,
        extra_data_axis="replicate",
    )
    assert made == [(Block, hybrid, "replicate")]


@pytest.mark.slow
def test_everything_wrapped(mesh):
    check(
        nn.Sequential(Block(), Block()),
        torch.randn(16, D),
        mesh,
        lambda m: SpmdFullyShardedDataParallel(m, mesh, auto_wrap_policy=always_wrap_policy),
    )
    policy = partial(size_based_auto_wrap_policy, min_num_params=2000)
    check(
        nn.Sequential(Block(), Block()),
        torch.randn(16, D),
        mesh,
        lambda m: SpmdFullyShardedDataParallel(m, mesh, auto_wrap_policy=policy),
    )


@dataclass
class Result:
    loss: torch.Tensor
    hidden: torch.Tensor


OUTPUTS = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, y.sum()), lambda out: out[0]),
    "list": (lambda y: [y, None], lambda out: out[0]),
    "logits": (
        lambda y: {"loss": y.sum(), "hidden": y * 2, "logits": y},
        lambda out: out["logits"],
    ),
    "dict": (lambda y: {"loss": y.sum(), "hidden": y}, lambda out: out["hidden"]),
    "dataclass": (lambda y: Result(y.sum(), y), lambda out: out.hidden),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_part_of_the_output_that_is_marked(mesh, name):
    make, marked = OUTPUTS[name]
    assert marked(
        fully_shard(Returning(make), mesh)(torch.randn(16, D, device="xla"))
    ).partition_spec == ("fsdp", None)


def test_an_output_of_ones_own(mesh):
    calls = []

    def shard_output(output, given):
        calls.append(given)
        spmd.mark_sharding(output["y"][1], given, (None, "fsdp"))

    module = SpmdFullyShardedDataParallel(
        Returning(lambda y: {"y": (None, y)}), mesh, shard_output=shard_output
    )
    assert module(torch.randn(16, D, device="xla"))["y"][1].partition_spec == (
        None,
        "fsdp",
    ) and calls == [mesh]


def test_a_loss_and_a_short_batch_are_left_to_the_partitioner(mesh, num_devices):
    assert (
        fully_shard(Returning(torch.sum), mesh)(torch.randn(16, D, device="xla")).sharding is None
    )
    marked = fully_shard(Returning(lambda y: y), mesh)(torch.randn(1, D, device="xla")).sharding
    assert (marked is None) == (num_devices > 1)
