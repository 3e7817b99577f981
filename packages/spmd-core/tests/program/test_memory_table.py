"""Errors where memory runs out: whose the largest tensors are, how they are split, how large."""

import gc
import re

import pytest
import torch
from recorded_graphs import graph_of
from torch import nn

import spmd_core as spmd
from spmd_core.graph.recorders import lock
from spmd_core.graph.storage import pending
from spmd_core.program import memory_table, tensor_names
from spmd_core.program.planning import plan
from spmd_core.runtime import in_flight

EDGE = 1 << 25  # a product of two such sizes is petabytes, which no machine has


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.up(x).relu()
        result: torch.Tensor = self.down(hidden) * self.scale
        return result


def table() -> str:
    """Of the program that would compute what is pending."""
    with lock:
        graph = plan(pending()).graph()
    return memory_table.text(graph, tensor_names.names())


def entry(text: str, name: str) -> str:
    """The lines of one tensor, without the spaces."""
    (found,) = re.findall(rf"^ *[\d,.]+ [MG]B +{re.escape(name)}.*\n(?:^ {{16}}.*\n?)+", text, re.M)
    return " ".join(found.split())


def test_names_layouts_and_what_a_split_would_take(num_devices: int) -> None:
    if num_devices < 4:
        pytest.skip("needs two axes")
    mesh = spmd.Mesh(range(num_devices), (num_devices // 2, 2), ("fsdp", "tensor"))
    net = Net().to("xla")
    spmd.mark_sharding(net.up.weight, mesh, ("tensor", None))
    optimizer = torch.optim.AdamW(net.parameters())
    with spmd.debugging.source_lines():
        for _ in range(2):
            net(torch.ones(3, 64, device="xla")).sum().backward()
            optimizer.step()
            spmd.sync()
        net(torch.ones(3, 64, device="xla")).sum().backward()
        optimizer.step()
        text = table()
        pairs = mesh.shape()["fsdp"]
        assert entry(text, "Net.down.weight").startswith(
            f"0.1 MB Net.down.weight, float32[64, 512] replicated on all {num_devices} devices; "
            f"if split over fsdp={pairs} 0.0 MB, over tensor=2 0.1 MB made at {__file__}:"
        )
        assert f"split ('tensor', None) over fsdp={pairs}, tensor=2; if split over fsdp=" in entry(
            text, "Net.up.weight"
        )
        assert "float32[64, 512]" in entry(text, "exp_avg_sq of Net.down.weight")
        assert "'tensor', None" in entry(text, "exp_avg of Net.up.weight")
        assert "exp_avg of Net.down.weight" in text and "record_source_lines" not in text
        spmd.sync()
        spmd.set_global_mesh(mesh)
        # The advice: what it says of a split is what a split takes.
        wide = nn.Linear(1024, 4096, bias=False, device="xla")
        before = entry(table(), "Linear.weight")
        assert "16.8 MB Linear.weight, float32[4096, 1024] by aten::" in before
        assert f"recorded at {__file__}:" in before
        (promised,) = re.findall(rf"over fsdp={pairs} (\S+ MB)", before)
        spmd.mark_sharding(wide.weight, mesh, ("fsdp", None))
        assert entry(table(), "Linear.weight").startswith(f"{promised} Linear.weight")
    spmd.sync()


def test_names_of_what_is_exempt_from_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of `few_objects`
    layer = nn.Linear(3, 5, bias=False).to("xla")
    was_exempt = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        assert "Linear.weight" in tensor_names.names().values()
        assert gc.get_freeze_count() > 0 and layer not in gc.get_objects()
    finally:
        if not was_exempt:
            gc.unfreeze()


def test_without_marks_and_lines() -> None:
    x = torch.ones(1024, 1024, device="xla")
    spmd.sync()
    y = x + 1
    kept = y * 2
    num_devices = spmd.global_runtime_device_count()
    where = "on the only device"
    if num_devices > 1:
        where = f"replicated on all {num_devices} devices; if split over all devices "
        where += f"{4.194304 / num_devices:.1f} MB"
    text = table()
    assert entry(text, "aten::mul.Tensor") == f"4.2 MB aten::mul.Tensor float32[1024, 1024] {where}"
    assert entry(text, "an argument") == f"4.2 MB an argument, float32[1024, 1024] {where}"
    assert "spmd.config.record_source_lines = True" in text
    # Alike ones have one line.
    more = [x + i for i in range(4)]
    assert "5 x aten::add.Tensor" in table() and more
    spmd.sync()
    del kept


def test_memory_that_runs_out_while_programs_run() -> None:
    """The error is of the program that asked for it, also where a later one is read."""
    net = Net().to("xla")
    x = torch.ones(EDGE, device="xla")
    other = torch.arange(3, device="xla") + 1
    spmd.sync()
    with spmd.debugging.source_lines():
        huge = x[:, None] * x[None, :] + net.down.bias[0]
    spmd.sync()
    later = huge[0, :2] * 2
    for _ in range(2):  # the second time, nothing is in flight any more
        with pytest.raises(spmd.errors.DeviceMemoryError) as caught:
            later.tolist()
        text = str(caught.value)
        assert re.search(r"must fit the device's memory; spmd_\d+ops_2in .* needed at .*:\d+", text)
        assert f"float32[{EDGE}, {EDGE}]" in text and f"recorded at {__file__}:" in text
        assert "Out of memory allocating" in text and "Load them again" in text
        first, second = text.splitlines()[3], text.splitlines()[4]
        assert ("GB  aten::" in first and "equal share" in second) or "replicated" in second
    spmd.sync(wait=True)
    assert other.tolist() == [1, 2, 3]
    assert net(torch.ones(2, 64, device="xla")).shape == (2, 64)
    small = x[:2, None] * x[None, :2]  # the advice: less of it
    assert small.sum().item() == 4


def test_a_failure_that_nobody_knows_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(EDGE, device="xla")
    huge = x[:, None] * x[None, :]
    spmd.sync()
    with pytest.raises(spmd.errors.DeviceMemoryError):
        spmd.sync(wait=True)
    monkeypatch.setattr(in_flight, "programs", in_flight.InFlight())
    with pytest.raises(
        spmd.errors.ProgramError, match=r"spmd\.sync\(wait=True\) after each step to find"
    ):
        in_flight.wait_for(huge._handle.value.data)


def test_what_is_an_array_of_its_own() -> None:
    """A function whose name begins like a transpose's is, and a view or a cast is none."""
    x = torch.ones(8, 4, device="cpu").to("xla")
    y = x.tanh().t().double().view(1, 4, 8)
    shown = memory_table.text(graph_of(y.sin()).recorded, {})
    assert "aten::tanh float32[8, 4]" in shown and "aten::sin float64[1, 4, 8]" in shown
    assert not any(f"aten::{name}" in shown for name in ("t ", "_to_copy", "view"))
