"""Sharding rules by name: which rule applies, the report, and what strict mode refuses.

Nothing is marked before all rules are checked.
"""

import pytest
import torch
from torch import nn

import spmd_core as spmd


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(16, 2))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to("xla")


def test_first_rule_that_is_found_applies(mesh_2d):
    net = model()
    report = spmd.shard_module(
        net, {r"^0\.weight$": ("a", "b"), "weight": (), r"\.bias$": None}, mesh_2d
    )
    assert net[0].weight.partition_spec == ("a", "b")
    assert net[1].weight.partition_spec == (None,) and net[2].weight.partition_spec == (None, None)
    assert net[0].bias.sharding is None
    assert report.marked == {"0.weight": ("a", "b"), "1.weight": (), "2.weight": ()}
    assert report.left == ("0.bias", "1.bias", "2.bias")
    assert report.ambiguous == {"0.weight": (r"^0\.weight$", "weight")}
    assert not report.unmatched_names and not report.unmatched_rules
    assert "0.bias  left to the partitioner" in str(report)


def test_what_matched_nothing_is_reported(mesh_2d):
    net = model()
    report = spmd.shard_module(net, {"0.weight": ("a",), "attention": ("b",)}, mesh_2d)
    assert report.unmatched_rules == ("attention",)
    assert report.unmatched_names == ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert "rule 'attention' is for no parameter or buffer" in str(report)


def test_strict_refuses_and_marks_nothing(mesh_2d):
    net = model()
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"rule 'attention' is for no parameter or buffer; no rule is for '1\.weight'",
    ):
        spmd.shard_module(net, {"[02]": (), "attention": ("b",)}, mesh_2d, strict=True)
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"'0\.weight' has rules with different specs: '0\.weight', 'weight'",
    ):
        spmd.shard_module(net, {"0.weight": ("a",), "weight": (), "bias": ()}, mesh_2d, strict=True)
    assert all(p.sharding is None for p in net.parameters())
    # Two rules whose specs mean the same are accepted.
    assert not spmd.shard_module(
        net,
        {"0.weight": ("a",), "^0.weight": ("a", None), "[12].weight": (), "bias": ()},
        mesh_2d,
        strict=True,
    ).problems


def test_tied_weights_are_one_tensor(mesh_2d):
    net = Tied().to("xla")
    report = spmd.shard_module(net, {"head": ("a",), "table": ()}, mesh_2d, strict=True)
    assert report.marked == {"embed.weight": ("a",), "table": ()}
    assert net.embed.weight is net.head.weight and net.head.weight.partition_spec == ("a", None)
    other = spmd.shard_module(
        Tied().to("xla"), {"head": ("a",), "embed": ("b",), "table": ()}, mesh_2d
    )
    assert other.ambiguous == {"embed.weight": ("head", "embed")}


def test_specs_with_a_mesh_of_their_own(mesh_1d, mesh_2d):
    net = model()
    spmd.shard_module(
        net, {"0.weight": spmd.ShardingSpec(mesh_1d, ("x", None)), "2.weight": ("b",)}, mesh_2d
    )
    assert net[0].weight.partition_spec == ("x", None) and net[2].weight.partition_spec == (
        "b",
        None,
    )


def test_values_are_kept(mesh_2d):
    net, x = nn.Linear(8, 16), torch.randn(4, 8)
    with torch.no_grad():
        expected = net(x)
    net.to("xla")
    spmd.shard_module(net, {"weight": ("a", "b"), "bias": ("a",)}, mesh_2d, strict=True)
    torch.testing.assert_close(net(x.to("xla")).cpu(), expected)


def test_every_rule_is_checked_before_the_first_mark(mesh_2d):
    net = model()
    with pytest.raises(
        spmd.errors.PartitionSpecError,
        match=r"rule 'bias' does not fit '0\.bias' of shape \(16,\): .*more entries",
    ):
        spmd.shard_module(net, {"weight": ("a",), "bias": ("a", "b")}, mesh_2d)
    with pytest.raises(ValueError, match=r"regular expression over names; got '\('"):
        spmd.shard_module(net, {"weight": ("a",), "(": ()}, mesh_2d)
    with pytest.raises(
        spmd.errors.MeshError,
        match="rule 'weight' needs a mesh; got None, and no global mesh is set",
    ):
        spmd.shard_module(net, {"weight": ("a",)})
    assert all(p.sharding is None for p in net.parameters())


def test_a_module_on_the_host_is_refused_whole(mesh_2d):
    net = nn.Sequential(nn.Linear(8, 8).to("xla"), nn.Linear(8, 8))
    with pytest.raises(
        spmd.errors.DeviceMismatchError,
        match=r"shard_module \(1\.weight\) needs a tensor on device 'xla'",
    ):
        spmd.shard_module(net, {"weight": ("a",)}, mesh_2d)
    assert net[0].weight.sharding is None
