"""Tests torch_xla.debug.metrics: the counters and metrics that programs read."""

import warnings

import pytest
import torch

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs


@pytest.fixture(autouse=True)
def clear():
    met.clear_all()


def test_nothing_is_none():
    assert met.counter_names() == [] and met.metric_names() == []
    for name in (
        "MarkStep",
        "ExecuteReplicated",
        "ExecuteComputation",
        "CreateIotaOpSharding",
        "UncachedOutputSharding",
        "nonsense",
        "aten::nonzero",
    ):
        assert met.counter_value(name) is None and met.metric_data(name) is None


def test_a_step_of_a_sharded_tensor(row):
    x = xs.mark_sharding(torch.ones(2, 8).to("xla"), row, (0, 1))
    x += 2
    torch_xla.sync()
    assert (
        met.metric_data("ExecuteReplicatedTime")[0] == 1
        and met.counter_value("ExecuteReplicated") == 1
    )
    assert met.counter_value("MarkStep") == 1 and met.counter_value("VirtualDeviceUsage") == 1
    assert (
        met.counter_value("UncachedCompile") in (None, 1)
        and met.counter_value("ExecuteComputation") is None
    )
    x.cpu()
    assert (
        met.counter_value("ReplicateShardedData") == 1
        and met.metric_data("TransferFromDeviceTime")[0] == 1
    )
    assert (
        met.metric_data("OutboundData")[1] == 64 and met.metric_data("TransferToDeviceTime")[0] == 1
    )


def test_compiled_once_then_found():
    shape = (3, 17, 5)
    for _ in range(2):
        (torch.ones(shape, device="xla") * 3 + 1).sum().item()
    assert met.counter_value("UncachedCompile") >= 1 and met.counter_value("CachedCompile") >= 1
    count, total, samples = met.metric_data("CompileTime")
    assert count == len(samples) and total > 0


def test_donated_inputs_are_counted():
    x = torch.zeros(4, 19, device="xla")
    torch_xla.sync()
    met.clear_all()
    x += 1
    torch_xla.sync()
    assert met.metric_data("InputOutputAliasCount")[1] == 1


def test_an_operation_on_the_host():
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # issued once in a process: another test may have caused it already
        torch.ops.aten._add_relu(torch.ones(3, device="xla"), torch.ones(3, device="xla"))
    assert (
        met.executed_fallback_ops() == ["aten::_add_relu"]
        and met.counter_value("aten::_add_relu") == 1
    )
    assert "aten::_add_relu" in met.counter_names()


def test_reports():
    (torch.ones(3, device="xla") + 1).tolist()
    torch_xla.sync()
    assert (
        "Counter: MarkStep\n  Value: 1" in met.metrics_report()
        and "Metric: ExecuteReplicatedTime" in met.metrics_report()
    )
    assert (
        met.short_metrics_report(counter_names=["MarkStep"], metric_names=[])
        == "Counter: MarkStep\n  Value: 1"
    )
    assert (
        "MarkStep" in met.short_metrics_report()
        and "executions" in torch_xla._XLAC._xla_metrics_report()
    )


@pytest.mark.parametrize("clear", [met.clear_counters, met.clear_metrics])
def test_clearing(clear):
    torch_xla.sync()
    clear()
    assert met.counter_value("MarkStep") is None
