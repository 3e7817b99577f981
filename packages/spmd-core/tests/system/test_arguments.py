"""Numbers and switches among the arguments of public functions are refused if they are none.

Each is refused by this project's own message, which says the rule and what it got.
"""

import inspect
from types import UnionType
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import spmd_core as spmd
import spmd_data
from spmd_core import debugging, metrics
from spmd_core.debugging import profiler
from spmd_core.modules import barrier, einsum_linear
from spmd_core.modules.wrap_policies import size_based_auto_wrap_policy
from spmd_core.runtime import startup
from spmd_core.runtime.processes import get_1d_mesh
from spmd_core.sharding.sharding import Sharding
from spmd_core.torch_backend import random_state
from spmd_data import synthetic


def _pipeline(**options):
    mesh = get_1d_mesh("pipe")
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(mesh.size())))
    return spmd.pipeline(blocks, mesh, axis="pipe", **{"num_microbatches": 2, **options})


def _loss(num_chunks):
    x, w = torch.ones(4, 3, device="xla"), torch.ones(5, 3, device="xla")
    targets = torch.zeros(4, dtype=torch.int64, device="xla")
    return spmd.linear_cross_entropy(x, w, targets, num_chunks=num_chunks)


def _sharding(ndim=2):
    return Sharding.of(spmd.Mesh([0], (1,), ("x",)), ("x",), ndim)


# By the argument's name: a call with the argument alone, and whether 0 is a value that it takes.
ARGUMENTS = {
    "simulate: devices": (spmd.simulate, False),
    "num_devices": (lambda n: get_1d_mesh("x", n), False),
    "mesh_shape": (lambda n: spmd.Mesh([0], (n,), ("x",)), False),
    "device_ids": (lambda n: spmd.Mesh([n], (1,), ("x",)), True),
    "ici_mesh_shape": (lambda n: spmd.HybridMesh(ici_mesh_shape=(n,)), False),
    "init_device_mesh: mesh_shape": (lambda n: spmd.dtensor.init_device_mesh("xla", (n,)), False),
    "num_microbatches": (lambda n: _pipeline(num_microbatches=n), False),
    "rounds": (lambda n: _pipeline(rounds=n), False),
    "num_chunks": (_loss, False),
    "max_different_graphs": (lambda n: spmd.compile(name="f", max_different_graphs=n), False),
    "max_shard_bytes": (
        lambda n: spmd.save_safetensors(nn.Linear(2, 2), "nowhere", max_shard_bytes=n),
        False,
    ),
    "num_slices": (lambda n: spmd.plan(print, topology="v4-8", num_slices=n), False),
    "quiet_steps": (lambda n: spmd.plan(print, topology="v4-8", quiet_steps=n), False),
    "last": (debugging.explain_recompile, False),
    "min_num_params": (
        lambda n: size_based_auto_wrap_policy(nn.Linear(2, 2), False, 1, min_num_params=n),
        True,
    ),
    "ndim": (lambda n: Sharding.of(spmd.Mesh([0], (1,), ("x",)), (), n), True),
    "priority": (lambda n: Sharding.marked(_sharding().mesh, (), 1, priority=n), True),
    "padded_shape": (lambda n: _sharding().padded_shape((2, n)), True),
    "shard_shape": (lambda n: _sharding().shard_shape((n, 2)), True),
    "indices": (lambda n: _sharding().indices((n, 2)), True),
    "length": (
        lambda n: spmd.scan(lambda x, _: (x, None), torch.ones(2, device="xla"), length=n),
        True,
    ),
    "parse_mesh: num_devices": (lambda n: spmd.parse_mesh("x=-1", n), False),
    "count: amount": (lambda n: metrics.count("uploads_of_this_test", n), True),
    "row_mask": (lambda n: spmd_data.ShardedSampler(8, batch_size=2).row_mask(0, n), True),
    "epoch": (spmd_data.ShardedSampler(8, batch_size=2).set_epoch, True),
    "num_parts": (lambda n: spmd_data.ShardedSampler(8, batch_size=2, num_parts=n), False),
    "batch_size": (lambda n: spmd_data.ShardedSampler(8, batch_size=n), False),
    "prefetch": (lambda n: spmd_data.MpDeviceLoader([], "xla", prefetch=n), True),
    "transfer_threads": (lambda n: spmd_data.MpDeviceLoader([], "xla", transfer_threads=n), False),
    "batches_per_execution": (
        lambda n: spmd_data.MpDeviceLoader([], "xla", batches_per_execution=n),
        False,
    ),
}
BAD = [2.5, 2.0, True, -1, 0, "2", "many", float("nan"), [2], b"2"]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_values_are_refused_with_the_rule(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, takes_zero = ARGUMENTS[argument]
    for value in BAD:
        if value == 0 and value is not False and takes_zero:
            continue
        with pytest.raises((ValueError, TypeError, spmd.errors.SpmdError)) as caught:
            call(value)
        text = str(caught.value)
        assert "; got " in text or ", got " in text, f"{argument}={value!r}: {text}"
    assert not list(tmp_path.iterdir()), "nothing is written for a call that is refused"


def test_what_the_refusals_advise():
    assert get_1d_mesh("x", 1).size() == 1
    assert isinstance(_pipeline(num_microbatches=8), nn.Module)
    assert _loss(1).shape == ()


_PUBLIC = (spmd, spmd.dtensor, spmd.distributed, spmd.manual)


def _public_functions():
    """The public functions, constructors and methods, by the names that users write."""
    for module in (*_PUBLIC, debugging, metrics, profiler, spmd_data, synthetic):
        for name, value in vars(module).items():
            package = getattr(value, "__module__", None) or ""
            if name[:1] == "_" or package[:4] != "spmd" or package == "spmd_core.arguments":
                continue
            members = vars(value).items() if isinstance(value, type) else [("", value)]
            for member, function in members:
                function = getattr(function, "__func__", function)  # of a classmethod
                if inspect.isfunction(function) and (member == "__init__" or member[:1] != "_"):
                    path = f"{module.__name__}.{name}" + f".{member}" * bool(member)
                    yield path.removesuffix(".__init__"), function


def _numbers(function):
    """The arguments whose annotation is `int`, `float` or `bool`, perhaps or None."""
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
        if set(kinds) - {type(None)} in ({int}, {float}, {bool}):
            yield name


CHECKED = {name: f for name, f in _public_functions() if hasattr(f, "checks")}
# Arguments that no annotation checks, with the reason.
BY_HAND = "checked inside, and refused in the tests above and below"
RESULT = "the library makes it, users read it"
OWN = "the library's own calls alone"
EACH = "one call for each document that is read; an index is refused where the array is read"
UNCHECKED = {
    "spmd_core.strict": (BY_HAND, "enabled"),
    "spmd_core.mark_sharding": (BY_HAND, "inplace priority"),
    "spmd_core.constrain": (BY_HAND, "priority"),
    "spmd_core.Pipeline.check_batch": (OWN, "rows"),
    "spmd_core.Pipeline.chunk": (OWN, "round"),
    "spmd_core.pipeline": (BY_HAND, "num_microbatches rounds"),
    "spmd_core.scan": (BY_HAND, "length reverse"),
    "spmd_core.simulate": (BY_HAND, "num_devices"),
    "spmd_core.parse_mesh": (BY_HAND, "num_devices"),
    "spmd_core.ShardingSpec": (BY_HAND, "minibatch"),
    "spmd_core.save_safetensors": (BY_HAND, "max_shard_bytes"),
    "spmd_core.on_preemption": (BY_HAND, "deadline_s"),
    "spmd_core.distributed.stop_on_signals": (BY_HAND, "deadline_s"),
    "spmd_core.debugging.explain_recompile": (BY_HAND, "last"),
    "spmd_core.metrics.count": (BY_HAND, "amount"),
    "spmd_data.ShardedSampler.set_epoch": (BY_HAND, "epoch"),
    "spmd_data.MpDeviceLoader": (
        BY_HAND,
        "prefetch transfer_threads batches_per_execution stall_warning_s",
    ),
    "spmd_data.Documents.tokens": (EACH, "document"),
    "spmd_data.TokenStream.tokens": (EACH, "document"),
    "spmd_data.TokenCache.tokens": (EACH, "document"),
    "spmd_core.debugging.Change": (RESULT, "is_settling"),
    "spmd_core.debugging.Recompile": (RESULT, "seconds"),
    "spmd_core.metrics.HostFallback": (RESULT, "count"),
    "spmd_core.metrics.Peak": (RESULT, "flops_per_s"),  # NaN in a plan
    "spmd_core.metrics.FlopCount": (RESULT, "by_compiler num_jax_calls"),
    "spmd_core.metrics.Traffic": (RESULT, "number result_bytes moved_bytes is_exact"),
    **{
        name: (RESULT, " ".join(_numbers(result.__init__)))
        for name, result in {
            "spmd_core.debugging.Collective": debugging.Collective,
            "spmd_core.metrics.Chip": metrics.Chip,
            "spmd_core.metrics.FirstStep": metrics.FirstStep,
            "spmd_core.metrics.MemoryUse": metrics.MemoryUse,
            "spmd_core.metrics.ProgramRecord": metrics.ProgramRecord,
        }.items()
    },
}


def test_every_public_number_and_switch_is_checked_or_listed():
    found = {}
    for name, function in _public_functions():
        unchecked = set(_numbers(function)) - set(getattr(function, "checks", ()))
        if unchecked:
            found[name] = unchecked
    listed = {name: set(arguments.split()) for name, (_, arguments) in UNCHECKED.items()}
    assert found == listed, "decorate the function with arguments.checked, or list it with a reason"


NO_NUMBERS = ["many", None, float("nan"), [2], b"2"]


@pytest.mark.parametrize("name", CHECKED)
def test_annotated_numbers_and_switches_are_refused_before_anything_happens(name):
    function = CHECKED[name]
    parameters = inspect.signature(function).parameters
    required = {
        key: 1 if parameter.annotation in (int, float, bool) else object()
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    for argument in function.checks:
        annotation = str(parameters[argument].annotation)
        bad = NO_NUMBERS + {True: [2.5, 2, -1], False: [True]}["bool" in annotation]
        bad += [2.5, 2.0] if "int" in annotation else []
        for value in bad:
            if value is None and "None" in annotation:
                continue
            bound = inspect.signature(function).bind(**{**required, argument: value})
            message = f"{argument} is .*; got .*Write "
            with pytest.raises((TypeError, ValueError), match=message):
                function(*bound.args, **bound.kwargs)


def test_what_is_checked():
    assert len(CHECKED) > 20
    for value in (True, 1, 0, False):
        spmd.sync(wait=value)
    with pytest.raises(TypeError, match="wait is True or False; got 'no'"):
        spmd.sync(wait="no")
    with pytest.raises(ValueError, match=r"since is a whole number of at least 0; got -1"):
        metrics.step_program(since=-1)
    x, w = torch.ones(4, 3, device="xla"), torch.ones(5, 3, device="xla")
    targets = torch.zeros(4, dtype=torch.int64, device="xla")
    with pytest.raises(ValueError, match=r"label_smoothing is a share from 0 to 1; got 2\.5"):
        spmd.linear_cross_entropy(x, w, targets, label_smoothing=2.5)


def test_switches_and_texts_that_are_checked_inside():
    mesh, message = spmd.Mesh([0], (1,), ("x",)), r"; got .*[.] (Write|Pass)"
    for call in (
        lambda: spmd_data.ShardedSampler(2.5, batch_size=2),
        lambda: spmd_data.ShardedSampler(True, batch_size=1),
        lambda: spmd.ShardingSpec(mesh, ("x",), minibatch="many"),
        lambda: spmd.mark_sharding(torch.ones(2, device="xla"), mesh, ("x",), inplace="no"),
        lambda: spmd.compile(5),
        lambda: spmd.compile(print, name=5),
        lambda: spmd.parse_mesh(8, 8),
        lambda: random_state.manual_seed("x"),
        lambda: random_state.set_rng_state(2.5),
        lambda: spmd.shard_module(nn.Linear(2, 2), mesh, {"weight": ()}),
        lambda: spmd_data.MpDeviceLoader([], "xla", stall_warning_s="many"),
        lambda: spmd_data.PackedSequences([[1, 2]], 4),
        lambda: torch.xla.set_device("cpu"),
        lambda: torch.xla.synchronize(9),
        lambda: torch.xla.get_rng_state("xla:2"),
    ):
        with pytest.raises((TypeError, spmd.errors.DeviceMismatchError), match=message):
            call()
    torch.xla.synchronize(0)
    torch.xla.set_device("xla")


def _in_a_region(collective, *args):
    mesh = get_1d_mesh("x")
    over = spmd.shard_map(
        lambda x: collective("text", "x", *args), mesh, in_specs=(("x",),), out_specs=("x",)
    )
    return over(torch.ones(8, device="xla"))


# By the argument's name: the calls that get a wrong object for it, and what the message advises.
OBJECTS = {
    "module": (
        [
            lambda: spmd.save_safetensors(5, "folder"),
            lambda: spmd.load_safetensors("text", "folder"),
            lambda: spmd.dtensor.distribute_module(None, get_1d_mesh("x")),
        ],
        "Write a module",
    ),
    "folder": ([lambda: spmd.save_safetensors(nn.Linear(2, 2), None)], "Write the folder's path"),
    "path": (
        [
            lambda: spmd.load_safetensors(nn.Linear(2, 2), 5),
            lambda: spmd.save({}, None),
            lambda: spmd.save({}, 5),
        ],
        "Write (the|a) path",
    ),
    "tensor": (
        [
            lambda: spmd.dtensor.distribute_tensor(np.ones(8), get_1d_mesh("x")),
            lambda: spmd.dtensor.distribute_tensor(None),
        ],
        r"Write a tensor, such as torch.as_tensor\(data\)",
    ),
    "partition_fn": (
        [lambda: spmd.dtensor.distribute_module(nn.Linear(2, 2), get_1d_mesh("x"), partition_fn=5)],
        "Write a function itself",
    ),
    "input_fn": (
        [lambda: spmd.dtensor.distribute_module(nn.Linear(2, 2), get_1d_mesh("x"), input_fn=5)],
        "Write a function itself",
    ),
    "local": ([lambda: spmd.dtensor.from_local(5, get_1d_mesh("x"))], "Write a tensor, such as"),
    "mesh": ([lambda: spmd.dtensor.to_device_mesh(5)], r"Write Mesh\(device_ids, mesh_shape"),
    "x": (
        [
            lambda: _in_a_region(spmd.manual.all_gather),
            lambda: _in_a_region(spmd.manual.all_reduce),
            lambda: _in_a_region(spmd.manual.reduce_scatter),
            lambda: _in_a_region(spmd.manual.all_to_all, 0, 0),
            lambda: _in_a_region(spmd.manual.collective_permute, ()),
        ],
        "Write (all_|reduce_|collective_).* of one device's tensor",
    ),
    "kind": ([lambda: metrics.chip_of([]), lambda: metrics.known_peak(None)], "such as 'TPU v4'"),
    "name": (
        [lambda: metrics.count([]), lambda: metrics.count(5), lambda: metrics.counter([])],
        "the counter's name, such as 'compiles'",
    ),
    "size": ([lambda: metrics.flops_per_token([])], r"Write ModelSize\("),
    "program": (
        [
            lambda: metrics.count_flops([]),
            lambda: metrics.memory_use("text"),
            lambda: metrics.memory_use([]),
            lambda: metrics.traffic(5),
        ],
        r"Write one of metrics\.programs\(\), or None",
    ),
}


@pytest.mark.parametrize("argument", OBJECTS)
def test_objects_of_another_kind_are_refused(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls, advice = OBJECTS[argument]
    before = metrics.counters()
    for call in calls:
        with pytest.raises(TypeError, match=rf"^{argument} is .*; got .*, of type .*{advice}"):
            call()
    assert not list(tmp_path.iterdir()) and metrics.counters() == before


def test_functions_meshes_and_structures_are_refused_if_they_are_none():
    mesh = get_1d_mesh("x")
    x = torch.ones(8, 4, device="xla")
    for value in (5, "text", None, [1]):
        for call in (
            lambda v=value: spmd.add_step_closure(v),
            lambda v=value: spmd.shard_map(v, mesh, in_specs=[("x",)], out_specs=("x",)),
            lambda v=value: spmd.call_jax(v, x),
            lambda v=value: spmd.plan(v, topology="v4-8"),
            lambda v=value: spmd.pipeline_loss(v, nn.Linear(2, 2), x),
        ):
            with pytest.raises(
                TypeError, match=r" is a function; got .*\. Write a function itself"
            ):
                call()
    for value in (5, "text", [1]):
        for call in (
            lambda v=value: spmd.pipeline_loss(print, v, x),
            lambda v=value: spmd.plan(print, topology=[v]),
            lambda v=value: spmd.send_to_device(torch.ones(8), v),
            lambda v=value: spmd_data.ShardedSampler(8, batch_size=2).load_state_dict(v),
            lambda v=value: spmd_data.MpDeviceLoader([x], "xla").load_state_dict(v),
        ):
            with pytest.raises(TypeError, match=r" is of type .*; got .*, of type .*\. Write "):
                call()
        with pytest.raises(
            spmd.errors.MeshError, match=r"a mesh is needed; got .*\. Build one: Mes"
        ):
            spmd.shard_map(print, value, in_specs=[("x",)], out_specs=("x",))
    with pytest.raises(
        TypeError, match=r"args is of type tuple or list; got 5, of type int\. Write"
    ):
        spmd.add_step_closure(print, 5)
    spmd.add_step_closure(print, [])


def test_names_of_the_axes_of_a_device_mesh():
    mesh = spmd.global_runtime_device_count()
    for shape, names in (
        ((mesh,), ("x", "y")),
        ((1, mesh), ("x", "x")),
        ((1, mesh), ("x",)),
        ((1, mesh), "xy"),
        ((mesh,), (1,)),
        ((mesh,), ("",)),
        ((mesh,), 5),
    ):
        with pytest.raises(
            spmd.errors.MeshError, match=r"axis.?names? must .*; got .*\. (Pass|Write|Name|Rename) "
        ):
            spmd.dtensor.init_device_mesh("xla", shape, mesh_dim_names=names)
    made = spmd.dtensor.init_device_mesh("xla", (1, mesh), mesh_dim_names=["x", "y"])
    assert made.mesh_dim_names == ("x", "y")


# Numbers far beyond what a program can take: each is refused at once, in a sentence.
TOO_LARGE = {
    "simulate": spmd.simulate,
    "Mesh": lambda n: spmd.Mesh(range(n), (n,), ("x",)),
    "Mesh of few": lambda n: spmd.Mesh(range(n), (8,), ("x",)),
    "Mesh shape": lambda n: spmd.Mesh([0], (n,), ("x",)),
    "parse_mesh": lambda n: spmd.parse_mesh("x=-1", n),
    "1-D mesh": lambda n: get_1d_mesh("x", n),
    "init_device_mesh": lambda n: spmd.dtensor.init_device_mesh("xla", (n,)),
    "slices": lambda n: spmd.plan(print, topology="v4-8", num_slices=n),
    "emulated": lambda n: spmd.plan(print, topology=f"cpu-{n}"),
    "transfer threads": lambda n: spmd_data.MpDeviceLoader([], "xla", transfer_threads=n),
    "prefetched batches": lambda n: spmd_data.MpDeviceLoader([], "xla", prefetch=n),
    "tokens": lambda n: synthetic.SyntheticTokens(8, seq=n, vocab_size=4),
    "images": lambda n: synthetic.SyntheticImages(8, size=n),
    "rows": lambda n: spmd_data.ShardedSampler(8, batch_size=2).row_mask(0, n),
    "seed": lambda n: random_state.manual_seed(n**3),
    "port": profiler.start_server,
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_numbers_that_are_far_too_large_are_refused_at_once(name):
    for number in (10**8, 10**18):
        with pytest.raises(ValueError, match=r"; got .*\. (Write|Pass|Name|Ask) "):
            TOO_LARGE[name](number)


def test_objects_that_hold_tensors_lines_and_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, ids = torch.ones(4, 3, device="xla"), torch.zeros(4, dtype=torch.int64, device="xla")
    sharding = spmd.ShardingSpec(get_1d_mesh("x"), ("x",), minibatch=True)
    sharded = spmd.mark_sharding(torch.ones(8, device="xla"), get_1d_mesh("x"), ("x",))
    before = metrics.counters()
    for value in (5, None, "text"):
        for call in (
            lambda v=value: spmd.linear_cross_entropy(v, x, ids),
            lambda v=value: spmd.linear_cross_entropy(x, x, v),
            lambda v=value: spmd.document_attention(v, x, x, ids),
            lambda v=value: spmd.document_attention(x, x, x, v),
            lambda v=value: spmd.from_process_local(v, sharding),
            lambda v=value: spmd.from_process_local(torch.ones(8), v),
            lambda v=value: barrier.apply_backward_optimization_barrier(v),
            lambda v=value: einsum_linear.apply_einsum_linear(v),
            lambda v=value: sharded.load_local_shards_(v),
            lambda v=value: sharded.load_local_shards_([v]),
            lambda v=value: metrics.record_program(v),
            lambda v=value: metrics.device_kind(v),
            lambda v=value: metrics.device_peak(v, dtype=torch.float32),
            lambda v=value: metrics.measured_peak(torch.device("cpu"), None, v),
            lambda v=value: metrics.mfu(v, items_per_s=1, num_devices=1, peak_flops=1),
            lambda v=value: spmd.dtensor.placements_of(v),
            lambda v=value: spmd.pipeline_loss(lambda model, v=v: v, _pipeline()),
        ):
            with pytest.raises(TypeError, match=r" is of type .*; got .*, of type .*\. Write "):
                call()
    for call in (
        lambda: metrics.mfu({"6N": "x"}, items_per_s=1, num_devices=1, peak_flops=1),
        lambda: metrics.measured_peak(torch.device("xla"), 5, torch.float32),
        lambda: fully_shard(nn.Linear(2, 2).to("xla"), ignored_params=5),
        lambda: fully_shard(nn.Linear(2, 2).to("xla"), offload_policy=5),
        lambda: _pipeline(batch_axes=5),
        lambda: torch.xla.set_device("zz"),
        lambda: torch.xla.get_rng_state(10**30),
        lambda: torch.xla.manual_seed(10**30),
        lambda: spmd.dtensor.parallelize_module(
            nn.Linear(2, 2).to("xla"), get_1d_mesh("x"), {5: spmd.dtensor.ColwiseParallel()}
        ),
    ):
        with pytest.raises(
            (TypeError, ValueError, RuntimeError), match=r"; got .*\. (Write|Leave|Give) "
        ):
            call()
    for value in (5, None):
        for call in (
            lambda v=value: metrics.count_fallback(v, "line"),
            lambda v=value: metrics.count_fallback("aten::nonzero", v),
            lambda v=value: profiler.start_trace(v),
            lambda v=value: profiler.Trace(v),
            lambda v=value: profiler.StepTrace(v),
            lambda v=value: profiler.trace_me(v),
            lambda v=value: startup.initialize_cache(v),
        ):
            with pytest.raises(TypeError, match=r" is of type str.*; got .*, of type .*\. Write "):
                call()
    for function in (spmd.send_to_device, spmd.to_cpu):
        with pytest.raises(
            TypeError, match=r"got an iterator of type generator\. Write list\(data"
        ):
            function(t for t in [x])
    with pytest.raises(TypeError, match=r"what is saved has a pickle: .* Save a module's"):
        spmd.save({"function": lambda: 0}, "file")
    with open("text", "w") as text, pytest.raises(TypeError, match="a file opened with 'wb'"):
        spmd.save({}, text)
    with pytest.raises(spmd.errors.UnsupportedOpError, match=r"process's part of .*\. Use dense"):
        spmd.from_process_local(torch.eye(8).to_sparse(), sharding)
    assert {**metrics.counters(), "uploads": 0} == {**before, "uploads": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


# Calls that eager torch refuses, by a device.
REFUSED_BY_TORCH = {
    **{
        f"{factory.__name__}{sizes}": (lambda d, f=factory, s=sizes: f(*s, device=d))
        for factory in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
        for sizes in ((-3,), (2, -1), (2**40, 2**40), (2**62, 4), (2.5,), ("3",), (True,))
    },
    "full": lambda d: torch.full((-3,), 1.0, device=d),
    "full text": lambda d: torch.full((3,), "a", device=d),
    "arange": lambda d: torch.arange(3, 1, device=d),
    "arange, step 0": lambda d: torch.arange(0, 3, 0, device=d),
    "arange to nan": lambda d: torch.arange(float("nan"), device=d),
    "arange to inf": lambda d: torch.arange(float("inf"), device=d),
    "linspace": lambda d: torch.linspace(0, 1, -1, device=d),
    "linspace 2.5": lambda d: torch.linspace(0, 1, 2.5, device=d),
    "logspace": lambda d: torch.logspace(0, 1, -1, device=d),
    "randint": lambda d: torch.randint(5, 5, (3,), device=d),
    "randint sizes": lambda d: torch.randint(0, 5, (-3,), device=d),
    "randint uint8": lambda d: torch.randint(0, 300, (3,), dtype=torch.uint8, device=d),
    "randperm": lambda d: torch.randperm(-1, device=d),
    "eye": lambda d: torch.eye(-1, device=d),
    "eye columns": lambda d: torch.eye(2, -1, device=d),
    "empty_strided": lambda d: torch.empty_strided((3,), (-1,), device=d),
    "empty_strided ranks": lambda d: torch.empty_strided((3, 2), (1,), device=d),
    "new_empty": lambda d: torch.ones(1, device=d).new_empty(-3),
    "new_zeros": lambda d: torch.ones(1, device=d).new_zeros(2**40, 2**40),
    "expand": lambda d: torch.ones(1, device=d).expand(-3),
    "repeat": lambda d: torch.ones(1, device=d).repeat(-3),
    "reshape": lambda d: torch.ones(6, device=d).reshape(-2, 3),
    "view": lambda d: torch.ones(6, device=d).view(-1, -1),
    "one_hot": lambda d: nn.functional.one_hot(torch.zeros(2, dtype=torch.int64, device=d), 0),
    "dropout": lambda d: nn.functional.dropout(torch.ones(2, device=d), 2.0),
    "bernoulli": lambda d: torch.ones(2, device=d).bernoulli_(2.0),
    "uniform": lambda d: torch.ones(2, device=d).uniform_(1, 0),
    "normal": lambda d: torch.ones(2, device=d).normal_(0, -1),
    "exponential": lambda d: torch.ones(2, device=d).exponential_(0),
    "geometric": lambda d: torch.ones(2, device=d).geometric_(2),
    "random": lambda d: torch.ones(2, device=d).random_(5, 5),
    "multinomial 0": lambda d: torch.multinomial(torch.ones(4, device=d), 0),
    "multinomial 9": lambda d: torch.multinomial(torch.ones(4, device=d), 9),
    "Linear": lambda d: nn.Linear(-1, 2, device=d),
    "Embedding": lambda d: nn.Embedding(-5, 2, device=d),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_sizes_and_numbers_that_torch_refuses_are_refused_as_there(name):
    call = REFUSED_BY_TORCH[name]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as eager:
        call("cpu")
    with pytest.raises(type(eager.value)):
        call("xla")


@pytest.mark.parametrize("device", ["xla:1", "xla:9", torch.device("xla", 9)])
def test_another_index_than_that_of_the_logical_device_is_refused(device):
    for call in (
        lambda: torch.zeros(2, device=device),
        lambda: torch.zeros(2).to(device),
        lambda: torch.zeros_like(torch.zeros(2, device="xla"), device=device),
        lambda: torch.zeros(2, device="xla").to(device),
        lambda: nn.Linear(2, 2).to(device),
    ):
        with pytest.raises(spmd.errors.DeviceMismatchError, match=r"got 'xla:\d'\. Write 'xla'"):
            call()
