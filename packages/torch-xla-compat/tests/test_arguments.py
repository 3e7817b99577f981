"""Numbers and switches that torch_xla's functions take are refused if they are none."""

import inspect
from types import UnionType
from typing import get_args

import pytest
import torch

import torch_xla
import torch_xla.core.functions
import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.checkpoint
import torch_xla.utils.utils
from torch_xla import amp, experimental

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


def test_a_world_of_one_reduces_tensors_of_the_host_too():
    x = torch.ones(2)
    assert xm.all_reduce("sum", x, scale=2.0).tolist() == [2.0, 2.0] and x.tolist() == [1.0, 1.0]
    assert xm.all_reduce("sum", x) is not x
    assert xm.all_reduce("sum", [x], scale=3.0) is None and x.tolist() == [3.0, 3.0]
