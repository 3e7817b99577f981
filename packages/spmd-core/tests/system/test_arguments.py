"""Numbers and switches among the arguments of public functions are refused if they are none.

Each is refused by this project's own message, which says the rule and what it got.
"""

import inspect

import pytest
import torch
from torch import nn

import spmd_core as spmd
import spmd_data
from spmd_core import debugging, metrics
from spmd_core.debugging import profiler
from spmd_core.modules.wrap_policies import size_based_auto_wrap_policy
from spmd_core.runtime.processes import get_1d_mesh


def _pipeline(**options):
    mesh = get_1d_mesh("pipe")
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(mesh.size())))
    return spmd.pipeline(blocks, mesh, axis="pipe", **{"num_microbatches": 2, **options})


def _loss(num_chunks):
    x, w = torch.ones(4, 3, device="xla"), torch.ones(5, 3, device="xla")
    targets = torch.zeros(4, dtype=torch.int64, device="xla")
    return spmd.linear_cross_entropy(x, w, targets, num_chunks=num_chunks)


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


def _checked_functions():
    """The public functions and constructors whose arguments are checked by their annotations."""
    for module in (spmd, debugging, metrics, profiler, spmd_data):
        for name, value in vars(module).items():
            if not name.startswith("_"):
                functions = vars(value).values() if isinstance(value, type) else [value]
                for function in functions:
                    if inspect.isfunction(function) and hasattr(function, "checks"):
                        yield f"{module.__name__}.{name}", function


CHECKED = dict(_checked_functions())
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
