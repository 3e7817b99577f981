"""Tests the top level of torch_xla: devices, steps, compile, seeds, launching."""

import pytest
import torch

import spmd_core as spmd
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr


def test_one_logical_device_and_all_physical_ones(num_devices):
    assert torch_xla.device() == torch_xla.device(0) == torch.device("xla:0")
    assert torch_xla.devices() == [torch.device("xla:0")] and torch_xla.device_count() == 1
    assert torch_xla.real_devices() == [f"CPU:{i}" for i in range(num_devices)]


@pytest.mark.parametrize("index", [1, -1])
def test_another_device_is_an_index_error(index):
    with pytest.raises(
        IndexError,
        match=rf"there is one logical device, with index 0; got {index}\. "
        r"Call torch_xla\.device\(\)",
    ):
        torch_xla.device(index)


def test_sync_counts_a_step_and_computes():
    met.clear_all()
    x = torch.ones(3, device="xla") + 1
    torch_xla.sync(wait=True)
    assert met.counter_value("MarkStep") == 1
    assert x.tolist() == [2.0] * 3


def test_a_step_syncs_before_and_after():
    met.clear_all()
    with torch_xla.step():
        x = torch.ones(3, device="xla") + 1
    assert met.counter_value("MarkStep") == 2 and met.counter_value("UncachedCompile") in (None, 1)
    assert x.tolist() == [2.0] * 3


def test_a_step_syncs_also_where_an_exception_leaves_it():
    met.clear_all()
    with pytest.raises(RuntimeError, match="of the user"), torch_xla.step():
        raise RuntimeError("of the user")
    assert met.counter_value("MarkStep") == 2


@pytest.mark.parametrize("form", ["call", "decorator", "with arguments", "context"])
def test_compile_in_each_form(form):
    def double(x):
        return x * 2

    x = torch.ones(3, device="xla")
    torch_xla.sync()
    met.clear_all()
    if form == "context":
        with torch_xla.compile():
            result = double(x)
    elif form == "with arguments":
        result = torch_xla.compile(full_graph=True, name="double")(double)(x)
    else:
        result = torch_xla.compile(double)(x)
    assert met.counter_value("MarkStep") == 2 and met.counter_value("ExecuteReplicated") == 1
    assert result.tolist() == [2.0] * 3


@pytest.mark.parametrize("form", ["call", "decorator"])
def test_a_captured_step_runs_its_program_again(form):
    def make(device):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = (layer(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    train, right = make("xla"), make("cpu")
    if form == "decorator":
        step = torch_xla.compile(capture=True)(train)
    else:
        step = torch_xla.compile(train, full_graph=True, name="train", capture=True)
    batches = torch.randn(6, 4, 3)
    for x in batches[:3]:
        torch.testing.assert_close(step(x).cpu(), right(x).detach())
    met.clear_all()
    for x in batches[3:]:
        torch.testing.assert_close(step(x).cpu(), right(x).detach())
    assert (step.recorded, step.replayed) == (2, 4), step.reason
    assert met.counter_value("ExecuteReplicated") == 3
    assert met.counter_value("UncachedCompile") is None


def test_a_captured_step_refuses_what_it_would_leave_out():
    def step(x):
        print(x.shape)
        return x + 1

    with pytest.raises(spmd.errors.CaptureError, match=r"got a print at .*test_torch_xla\.py"):
        torch_xla.compile(step, capture=True)(torch.ones(3, device="xla"))


def test_full_graph_refuses_a_read_inside():
    @torch_xla.compile(full_graph=True)
    def reads(x):
        return x * 2 if (x + 1).sum() > 0 else x

    with pytest.raises(RuntimeError, match="under full_graph=True nothing is executed inside"):
        reads(torch.ones(3, device="xla"))


def test_max_different_graphs_refuses_another_shape():
    step = torch_xla.compile(lambda x: x * 3, name="of one shape", max_different_graphs=1)
    step(torch.ones(3, device="xla"))
    with pytest.raises(RuntimeError, match="at most 1 different programs"):
        step(torch.ones(4, device="xla"))


def test_compiler_options_hold_until_they_are_cleared():
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    step = torch_xla.compile(lambda x: x.cosh() + 1, custom_compile_options=options)
    try:
        assert (
            spmd.config.compiler_options == options
            and step(torch.zeros(3, device="xla")).tolist() == [2.0] * 3
        )
        torch_xla.set_custom_compile_options({"xla_no_such_option": 1})
        with pytest.raises(RuntimeError, match="xla_no_such_option"):
            step(torch.zeros(3, device="xla")).tolist()
    finally:
        torch_xla.set_custom_compile_options({})
    assert (
        spmd.config.compiler_options == {}
        and step(torch.zeros(3, device="xla")).tolist() == [2.0] * 3
    )


def test_programs_are_named_after_the_users_line():
    x = torch.zeros(3, device="xla").cosh() + 2
    torch_xla.sync()
    assert x is not None and spmd.metrics.programs()[-1].source.startswith(f"{__file__}:")


def test_seeds_repeat():
    torch_xla.manual_seed(7)
    first = torch.rand(4, device="xla").tolist()
    torch_xla.manual_seed(7, device=torch_xla.device())
    assert torch.rand(4, device="xla").tolist() == first


def test_launch_is_refused_in_spmd_mode():
    assert xr.is_spmd()
    with pytest.raises(
        NotImplementedError,
        match=r"starts a process for each device.*Call fn\(0, \*args\) yourself",
    ):
        torch_xla.launch(print, args=())
    with pytest.raises(NotImplementedError, match=r"xmp\.spawn starts a process for each device"):
        torch_xla.xmp.spawn(print)


def test_launch_outside_of_spmd_mode_runs_one_replica_and_says_so(monkeypatch):
    monkeypatch.setattr("spmd_core.is_spmd", lambda: False)
    seen = []
    with pytest.warns(
        UserWarning, match=r"torch_xla\.launch starts .*here it runs one replica.*use_spmd\(\)"
    ) as warned:
        torch_xla.launch(lambda index, a: seen.append((index, a)), args=("a",))
    assert warned[0].filename == __file__
    with pytest.warns(
        UserWarning, match=r"xmp\.spawn starts .*spmd_core\.distributed\.initialize\(\) first"
    ):
        torch_xla.xmp.spawn(lambda index: seen.append(index))
    assert seen == [(0, "a"), 0]


def test_one_replica_that_was_asked_for_is_not_warned_of(monkeypatch):
    monkeypatch.setattr("spmd_core.is_spmd", lambda: False)
    seen = []
    torch_xla.launch(lambda index: seen.append(index), debug_single_process=True)
    torch_xla.xmp.spawn(lambda index: seen.append(index), nprocs=1)
    assert seen == [0, 0]


def test_version_is_the_one_whose_names_these_are():
    assert torch_xla.__version__ == "2.9.0"
