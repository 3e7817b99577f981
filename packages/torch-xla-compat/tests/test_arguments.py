"""Numbers and switches that torch_xla's functions take are refused if they are none."""

import inspect
from types import UnionType
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import spmd_core as spmd
import torch_xla
import torch_xla.core.functions
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint
import torch_xla.utils.utils
from torch_xla import _XLAC, amp, experimental
from torch_xla.core import xla_builder
from torch_xla.debug import metrics as debug_metrics
from torch_xla.distributed import xla_multiprocessing as xmp
from torch_xla.distributed.spmd import xla_sharding
from torch_xla.experimental import callback
from torch_xla.utils import checkpoint, dlpack

BAD = ["many", float("nan"), [2], b"2"]
# Arguments that no annotation checks here: what they are given to checks them.
UNCHECKED = {
    "device": "index",
    "manual_seed": "seed",
    "xla_device": "n",
    "set_rng_state": "seed",
    "HybridMesh": "num_slices",
    "ShardingSpec": "minibatch",
    "visualize_sharding": "min_width max_width use_color scale",
    "eager_mode": "enable",
    "eager_mode_context": "enable",
}
MODULES = (torch_xla, xm, xr, pl, xs, amp, experimental, torch_xla.core.functions)
MODULES += (torch_xla.utils.checkpoint, torch_xla.utils.utils, torch_xla.debug.profiler)


def _functions():
    for module in MODULES:
        for name, value in vars(module).items():
            package = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and package.startswith("torch_xla"):
                function = vars(value).get("__init__") if isinstance(value, type) else value
                if inspect.isfunction(function):
                    yield f"{module.__name__}.{name}", function


def _numbers(function):
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
        if set(kinds) - {type(None)} in ({int}, {float}, {bool}):
            yield name


def test_every_number_and_switch_is_checked_or_listed():
    for path, function in _functions():
        unchecked = set(_numbers(function)) - set(getattr(function, "checks", ()))
        listed = UNCHECKED.get(path.rpartition(".")[2], "").split()
        assert unchecked <= set(listed), f"{path}: decorate it with arguments.checked"


def test_bad_numbers_and_switches_are_refused_before_anything_happens():
    num_checked = 0
    for _, function in _functions():
        parameters = inspect.signature(function).parameters
        for argument in getattr(function, "checks", ()):
            required = {
                key: 1 if parameter.annotation in (int, float, bool) else object()
                for key, parameter in parameters.items()
                if parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            }
            for value in BAD:
                bound = inspect.signature(function).bind(**{**required, argument: value})
                with pytest.raises((TypeError, ValueError), match=f"{argument} is .*; got .*Write"):
                    function(*bound.args, **bound.kwargs)
            num_checked += 1
    assert num_checked > 40


@pytest.mark.parametrize("name", [*pl._LEAST])
def test_counts_of_loaders_are_refused_when_the_loader_is_made(name):
    for value in ("many", -1, 2.5, None, True):
        with pytest.raises((TypeError, ValueError), match=f"{name} is a whole number.*; got"):
            pl.MpDeviceLoader([], torch_xla.device(), **{name: value})
        with pytest.raises((TypeError, ValueError), match=f"{name} is a whole number.*; got"):
            pl.ParallelLoader([], [torch_xla.device()], **{name: value})
    pl.MpDeviceLoader([], torch_xla.device(), **{name: 1})


def test_functions_optimizers_and_modules_are_refused_if_they_are_none():
    for value in (5, "text", None, [1]):
        for call in (
            lambda v=value: xm.optimizer_step(v),
            lambda v=value: xm.reduce_gradients(v),
            lambda v=value: xm.broadcast_master_param(v),
            lambda v=value: xm.rendezvous("tag", v),
            lambda v=value: xm.mesh_reduce("tag", 1, v),
            lambda v=value: xm.do_on_ordinals(v),
            lambda v=value: xm.add_step_closure(v),
        ):
            with pytest.raises(TypeError, match=r" is (a function|of type .*); got .*\. Write "):
                call()


def test_dims_platforms_and_ordinals():
    value = torch.ones(2, 3, device="xla")
    for call in (
        lambda: xm.all_gather(value, dim=2),
        lambda: xm.all_gather(value, dim=-3),
        lambda: xm.reduce_scatter("sum", value, 1.0, scatter_dim=5, shard_count=1),
        lambda: xm.all_to_all(value, 2, 0, 1),
        lambda: xm.all_to_all(value, 0, 2, 1),
        lambda: xm.get_xla_supported_devices("ZZ"),
        lambda: xm.get_xla_supported_devices(max_devices=-1),
        lambda: xm.xla_device(devkind="ZZ"),
        lambda: xm.do_on_ordinals(print, ordinals="x"),
    ):
        with pytest.raises((IndexError, ValueError, TypeError), match=r"; got .*(Write|Leave)"):
            call()
    assert xm.all_gather(value, dim=-1) is value
    assert xm.get_xla_supported_devices(max_devices=1) == ["xla:0"]
    assert xm.do_on_ordinals(lambda: 3, ordinals=(0, 1)) == 3


NOTHING_HAPPENED = r"; got .*\. (Write|Save|Pass|Its|Move) "
USE = r"; got .*\. (Write|Use|Correct|Pass) "
REFUSED = r"; got .*\. (Write|Pass|Leave|Sort) "
NO_DEVICES = (5.5, None, "zz", "cpu", "xla:3")


def test_devices_that_are_none_are_refused():
    x = torch.ones(2)
    state = torch.get_rng_state()
    for value in NO_DEVICES:
        calls = [
            lambda v=value: xm.send_cpu_data_to_device(x, v),
            lambda v=value: xm.xla_device_hw(v),
            lambda v=value: xm.xla_real_devices([v]),
            lambda v=value: xm.xla_replication_devices([v]),
            lambda v=value: xm.set_replication(v, []),
            lambda v=value: xm.set_replication("xla", [v]),
            lambda v=value: xm.wait_device_ops([v]),
        ]
        if value is not None:
            calls += [
                lambda v=value: xm.get_rng_state(v),
                lambda v=value: xm.set_rng_state(3, v),
                lambda v=value: xm.fork_rng(v),
                lambda v=value: torch_xla.manual_seed(3, v),
                lambda v=value: xm.xla_device_kind(v),
                lambda v=value: xm.get_memory_info(v),
            ]
        if value != "cpu":  # on which the same loop runs in eager torch
            calls += [
                lambda v=value: pl.MpDeviceLoader([x], v),
                lambda v=value: pl.ParallelLoader([x], [v]),
                lambda v=value: pl.ParallelLoader([x], ["xla"]).per_device_loader(v),
            ]
        for call in calls:
            with pytest.raises((TypeError, RuntimeError, ValueError), match=REFUSED):
                call()
    assert torch.equal(torch.get_rng_state(), state)
    for device in ("xla", "xla:0", torch_xla.device()):
        xm.set_rng_state(xm.get_rng_state(device), device)
        with xm.fork_rng(device):
            torch.rand(1)
        assert xm.xla_device_hw(device) == xm.xla_device_hw(xm.xla_real_devices([device])[0])
        assert xm.send_cpu_data_to_device([x], device)[0].device.type == "xla"
        torch_xla.manual_seed(3, device)
        xm.set_replication(device, [device])
        xm.wait_device_ops([device])
        list(pl.MpDeviceLoader([x], device))
    assert xm.xla_real_devices() == xm.xla_real_devices([]) == xm.xla_real_devices(["xla:0"])
    assert isinstance(xm.xla_device_kind(), str)


def test_loaders_shardings_lists_and_replicas_that_are_none_are_refused():
    x = torch.ones(2, device="xla")
    device = torch_xla.device()
    for call in (
        *(lambda v=value: pl.MpDeviceLoader(v, device) for value in ("abc", {"a": x}, 5, list)),
        *(
            lambda v=value: pl.MpDeviceLoader([x], device, input_sharding=v)
            for value in ("x", 5, ("x",), print, {"a": "x"}, {"a": {"b": None}})
        ),
        lambda: pl.ParallelLoader("abc", [device]),
        lambda: pl.ParallelLoader([x], "xla"),
        lambda: pl.ParallelLoader([x], []),
        lambda: pl.ParallelLoader([x], [device], input_sharding="x"),
        lambda: xm.send_cpu_data_to_device(x, device, "x"),
        lambda: xm.send_cpu_data_to_device(x, device, {"a": None}),
        lambda: xm.unlazy(5),
        lambda: xm.unlazy(t for t in [x]),
        lambda: xm.wait_device_ops("xla"),
        lambda: xm.xla_real_devices(5),
        lambda: xm.all_reduce("sum", 5),
        lambda: xm.all_reduce("sum", [5]),
        lambda: xm.collective_broadcast(5),
        lambda: xm.collective_broadcast([x, 5]),
        lambda: xm.collective_permute(x, 5),
        lambda: xm.collective_permute(x, [0]),
        lambda: xm.collective_permute(5, [(0, 0)]),
        lambda: xm.all_gather(5),
        lambda: xm.reduce_scatter("sum", 5, 1.0, 0, 1),
        lambda: xm.all_to_all(5, 0, 0, 1),
        lambda: xm.all_reduce("sum", x, groups=5),
        lambda: xm.all_reduce("sum", x, groups=[0]),
        lambda: xm.is_xla_tensor(5),
        lambda: xm.get_stablehlo(5),
        lambda: xm.get_stablehlo([5]),
        lambda: xs.apply_xla_patch_to_nn_linear(5),
        lambda: xs.xla_patched_nn_linear_forward(5, x),
        lambda: xs.apply_backward_optimization_barrier(5),
        lambda: xm.rendezvous("tag", b"", [5]),
        lambda: xm.rendezvous("tag", b"", 5),
    ):
        with pytest.raises((TypeError, ValueError), match=REFUSED):
            call()
    loader = pl.MpDeviceLoader([x], device)
    loader._parallel_loader_kwargs["input_sharding"] = "x"
    with pytest.raises(TypeError, match=REFUSED):
        iter(loader)
    assert xm.rendezvous("tag", b"a", [0]) == [b"a"]
    xm.unlazy({"loss": x + 1, "parts": (x,)})


def test_what_is_saved_optimized_run_and_compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.ones(3, device="xla", requires_grad=True)
    optimizer = torch.optim.SGD([x])
    before = x.tolist()
    for call in (
        *(lambda v=value: xm.save({}, v) for value in (None, 5, [], True)),
        lambda: xm.save({"f": lambda: 0}, "file"),
        *(
            lambda v=value: xm.optimizer_step(optimizer, optimizer_args=v)
            for value in (5, "x", [1], {1: 2})
        ),
        *(lambda v=value: xm.do_on_ordinals(print, v) for value in (5, "ab", None)),
        *(lambda v=value: xm.do_on_ordinals(print, (), v) for value in (5, None, ["0"], [0.0])),
        *(lambda v=value: xm.optimization_barrier_(v) for value in (5, None, "x", [5], [None])),
        *(
            lambda v=value, f=function: f(v)
            for value in (5, "x", [1], {1: 2}, {"a": None}, {"a": [1]})
            for function in (
                torch_xla.set_custom_compile_options,
                lambda v: torch_xla.compile(print, custom_compile_options=v),
            )
        ),
        *(
            lambda v=value, f=function: f(v)
            for value in (5, None, "f")
            for function in (torch_xla.launch, xmp.spawn, xmp.MpSerialExecutor().run)
        ),
        lambda: torch_xla.launch(print, 5),
        lambda: xmp.spawn(print, "ab"),
        *(lambda v=value: xmp.MpModelWrapper(v) for value in (5, None, torch.nn.Linear)),
        lambda: xm.master_print("text", fd=5),
        lambda: xm.mesh_reduce("tag", object(), list),
        lambda: xm.send_cpu_data_to_device((t for t in [x]), "xla"),
        lambda: xm.send_cpu_data_to_device(iter([x]), "xla"),
        *(lambda v=value: xm.all_gather(x, output=v) for value in (5, [x])),
        lambda: xm.reduce_scatter("sum", x, 1.0, 0, 1, output=5),
        lambda: xm.set_rng_state(10**30),
        lambda: torch_xla.manual_seed(2**64),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=NOTHING_HAPPENED):
            call()
    assert x.tolist() == before and not list(tmp_path.iterdir())
    assert spmd.config.compiler_options == {}
    torch_xla.set_custom_compile_options({"xla_zz": True})
    with pytest.raises(
        spmd.errors.ProgramError, match=r"compiler_options .*: 'xla_zz'\. Correct the option's name"
    ):
        (torch.ones(3, device="xla") + 1).cpu()
    torch_xla.set_custom_compile_options({})
    assert xm.optimizer_step(optimizer, optimizer_args={"closure": lambda: 3.0}) == 3.0
    xm.optimizer_step(optimizer, optimizer_args={})
    assert xm.do_on_ordinals(lambda a: a, [7], ordinals=range(2)) == 7
    xm.save({"x": x}, tmp_path / "file")
    assert torch.load(tmp_path / "file")["x"].tolist() == before
    torch_xla.manual_seed(2**64 - 1)


def test_devices_that_hold_no_values_are_refused_when_a_loader_is_made():
    for device in ("meta", *(["cuda"] if not torch.cuda.is_available() else [])):
        for call in (
            lambda d=device: pl.MpDeviceLoader([torch.ones(2)], d),
            lambda d=device: pl.ParallelLoader([torch.ones(2)], ["xla", d]),
        ):
            with pytest.raises(
                RuntimeError, match=f"on which this torch computes.*; got '{device}'"
            ):
                call()
    for name in ("host_to_device_transfer_threads", "device_prefetch_size"):
        with pytest.raises(
            ValueError, match=rf"{name} is a whole number from \d to \d+; got 10{{9}}"
        ):
            pl.MpDeviceLoader([torch.ones(2)], "xla", **{name: 10**9})


def test_private_functions_shardings_and_small_modules():
    x = torch.ones(8, 4, device="xla")
    mesh = xs.get_1d_mesh("x")
    linear = torch.nn.Linear(4, 4).to("xla")
    for call in (
        *(
            lambda f=function, v=value: f(v)
            for value in (5, None, "text")
            for function in (
                _XLAC._get_xla_sharding_spec,
                _XLAC._get_xla_sharding_type,
                _XLAC._get_xla_op_sharding,
                _XLAC._get_xla_sharding_specs,
                _XLAC._get_xla_tensors_hlo,
                _XLAC._get_xla_tensors_text,
                _XLAC._get_xla_tensor_debug_info,
                _XLAC._get_graph_hash,
                _XLAC._xla_get_tensor_id,
                _XLAC._mark_manual_sharding,
                mesh.get_op_sharding,
                xs.ShardingSpec(mesh, ("x",)).apply,
                lambda v: _XLAC._get_xla_sharding_specs([v]),
                lambda v: _XLAC._global_tensor_from_cpu_shards(v, "{replicated}"),
                lambda v: _XLAC._global_tensor_from_cpu_shards([v] * mesh.size(), "{replicated}"),
                lambda v: _XLAC.XlaShardingSpec(v, None),
                lambda v: xla_sharding.MarkShardingFunction.apply(v, mesh, ("x",)),
                lambda v: xla_sharding.MarkShardingFunction.apply(x, v, ("x",)),
                lambda v: xla_sharding.MarkShardingFunction.apply(x, mesh, v),
                lambda v: xla_sharding.XLAPatchedLinear.apply(v, x),
                lambda v: xla_sharding.XLAPatchedLinear.apply(x, v),
                lambda v: xs.xla_patched_nn_linear_forward(linear, v),
                lambda v: checkpoint.checkpoint(v, x),
                dlpack.to_dlpack,
                dlpack.from_dlpack,
                lambda v: callback.on_ready_callback(x, v),
                lambda v: xla_builder.call_jax(print, v),
            )
        ),
        *(lambda v=value: _XLAC.OpSharding([], [], [], v) for value in (99, None, "x", [1])),
        lambda: xla_builder.call_jax(print, (x,), 5),
        lambda: xla_builder.call_jax(print, (x,), {1: 2}),
        *(lambda v=value: amp.autocast(v) for value in (5.5, "zz", None, "xla:3")),
        *(lambda v=value: amp.autocast("xla", dtype=v) for value in (5, "bf16")),
        *(lambda v=value: debug_metrics.counter_value(v) for value in (5, None)),
        *(lambda v=value: debug_metrics.metric_data(v) for value in (5, None)),
        lambda: debug_metrics.short_metrics_report(5),
        lambda: debug_metrics.short_metrics_report(["MarkStep"], "CompileTime"),
        lambda: torch_xla.utils.utils.getenv_as(5, int),
        lambda: torch_xla.utils.utils.getenv_as("HOME", 5),
        lambda: torch_xla.utils.utils.getenv_as("HOME", int),
        lambda: torch_xla.debug.profiler.start_server(65536),
        lambda: torch_xla.debug.profiler.start_trace(5),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=USE):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        amp.GradScaler(scale=5)
    with amp.autocast(torch_xla.device(), dtype=torch.bfloat16):
        assert (x @ x.t()).dtype == torch.bfloat16
    assert dlpack.from_dlpack(np.ones(2)).tolist() == [1.0, 1.0]
    assert xla_builder.call_jax(jnp.sum, [x], {"axis": 0}).tolist() == [8.0] * 4


def test_a_world_of_one_reduces_tensors_of_the_host_too():
    x = torch.ones(2)
    assert xm.all_reduce("sum", x, scale=2.0).tolist() == [2.0, 2.0] and x.tolist() == [1.0, 1.0]
    assert xm.all_reduce("sum", x) is not x
    assert xm.all_reduce("sum", [x], scale=3.0) is None and x.tolist() == [3.0, 3.0]
