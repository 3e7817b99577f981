"""What torch and jax lack is found by name and listed; importing works without it."""

import itertools
import os
import re
import sys
import tomllib
import types
from pathlib import Path

import fresh
import pytest
import torch

import spmd_core as spmd
from spmd_core import releases

# What each tested release lacks. Anything else that is absent is a misspelled name.
LANCZOS = {
    "aten._upsample_lanczos2d_aa.default",
    "aten._upsample_lanczos2d_aa_backward.default",
}
_COUNT = itertools.count()
OLDER_THAN_2_12 = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
HAS_CHOLESKY = "cholesky" in {
    schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()
}


@pytest.fixture(autouse=True)
def own_list(monkeypatch):
    """A copy of the list of what is absent, so that a test can add to it."""
    monkeypatch.setattr(releases, "_absent", dict(releases._absent))


def test_what_is_absent_is_known():
    expected = (LANCZOS if OLDER_THAN_2_12 else set()) | (
        set() if HAS_CHOLESKY else {"aten.cholesky.default"}
    )
    if sys.version_info >= (3, 13):
        expected |= {"torch._C._dynamo.guards.dict_version"}
    assert set(spmd.debugging.versions().absent) == expected


def test_a_number_of_a_dict_tells_of_changes_of_attributes():
    """Captured steps look for changes by it; CPython 3.13 writes attributes past the dict."""
    assert (releases.dict_version() is None) == (sys.version_info >= (3, 13))


@pytest.mark.parametrize(
    "version_of",
    [
        lambda mapping: 7,
        lambda mapping: next(_COUNT),
    ],
    ids=["never", "always"],
)
def test_a_number_that_does_not_tell_is_left_alone(version_of, monkeypatch):
    monkeypatch.setattr(torch._C._dynamo.guards, "dict_version", version_of)
    assert releases.dict_version() is None
    assert "compare all that dicts hold" in str(spmd.debugging.versions())


def test_versions_in_use():
    found = spmd.debugging.versions()
    assert found.torch == torch.__version__
    assert found.python == ".".join(str(n) for n in sys.version_info[:3])
    rows = str(found).splitlines()
    assert rows[0].split() == ["Python", found.python, "tested", "from", "3.11", "to", "3.13"]
    assert [row.split()[0] for row in rows] == ["Python", "torch", "jax", "jaxlib", *found.absent]


def test_the_tested_range_is_that_of_the_metadata_and_of_tox():
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "packages/spmd-core/pyproject.toml").read_text())["project"]
    tested = spmd.debugging.versions().tested
    assert project["requires-python"] == f">={tested['Python'][0]}"
    assert {f"torch>={tested['torch'][0]}", f"jax>={tested['jax'][0]}"} < set(
        project["dependencies"]
    )
    tox = (root / "tox.ini").read_text()
    ends = re.findall(r"other_releases\.sh (\d+\.\d+)\.\S+ \S+ (\d+\.\d+)\.", tox)
    assert ends == list(zip(tested["torch"], tested["jax"]))
    assert f"base_python = python{tested['Python'][0]}" in tox
    assert "newest-py{312,313}" in tox and tested["Python"][1] == "3.13"


def test_an_overload_that_is_absent_is_listed():
    assert releases.overload("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert releases.overload("aten.add.NoSuchOverload") is None
    assert releases.overloads({"aten.sin.default": 1, "aten.no_such_operation.default": 2}) == {
        torch.ops.aten.sin.default: 1
    }
    absent = spmd.debugging.versions().absent
    assert "aten.add.Tensor" not in absent
    assert "or the host, which is counted" in absent["aten.add.NoSuchOverload"]
    assert "aten.no_such_operation.default" in absent
    assert re.search(
        r"aten\.no_such_operation\.default +absent +torch's", str(spmd.debugging.versions())
    )
    with pytest.raises(ValueError, match=r"namespace\.op\.overload; got 'aten\.add'. Write for"):
        releases.overload("aten.add")


def test_a_module_that_is_absent_raises_when_it_is_read(monkeypatch):
    import jax.numpy  # noqa: PLC0415 - beside the call that returns it

    assert releases.jax_module("jax.numpy", "sin") is jax.numpy
    gone = releases.jax_module("jax.experimental.no_such_module", "f")
    partial = types.ModuleType("jax.partial")
    partial.there = 3
    monkeypatch.setitem(sys.modules, "jax.partial", partial)
    part = releases.jax_module("jax.partial", "there", "gone")
    assert part.there == 3
    for read, name in [
        (lambda: gone.f, "jax.experimental.no_such_module.f"),
        (lambda: part.gone, "jax.partial.gone"),
    ]:
        with pytest.raises(
            ImportError, match=f"this needs {name}, which jax .* does not have. Install jax 0.10 to"
        ):
            read()
    absent = spmd.debugging.versions().absent
    assert {"jax.experimental.no_such_module", "jax.partial.gone"} <= set(absent)
    assert "raises ImportError" in absent["jax.partial.gone"] and "jax.partial" not in absent


def test_a_module_that_is_there_and_fails_says_its_own_error(monkeypatch):
    def needs_another(name):
        raise ModuleNotFoundError("No module named 'that_jax_needs'", name="that_jax_needs")

    monkeypatch.setattr(releases.importlib, "import_module", needs_another)
    with pytest.raises(ModuleNotFoundError, match="that_jax_needs"):
        releases.jax_module("jax.experimental.layout")


@pytest.mark.parametrize(
    ("name", "release"),
    [("torch", "2.10.1"), ("torch", "2.16.0+cpu"), ("jax", "0.9.9"), ("jaxlib", "1.0.0rc1")],
)
def test_a_release_outside_the_tested_range_warns(monkeypatch, name, release):
    used = releases._used()
    monkeypatch.setattr(releases, "_used", lambda: {**used, name: release})
    message = (
        "spmd_core is tested with Python 3.11 to 3.13, torch 2.11 to 2.15, jax 0.10 to 0.12, "
        f"jaxlib 0.10 to 0.12; got {name} {release}. Install a tested release, or look at "
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        releases.warn_if_untested()
    assert spmd.debugging.versions().untested == (f"{name} {release}",)


@pytest.mark.parametrize("release", ["2.11.0", "2.15.9+cu140", "2.12.0a0+git1234"])
def test_a_tested_release_does_not_warn(monkeypatch, release):
    used = releases._used()
    monkeypatch.setattr(releases, "_used", lambda: {**used, "torch": release})
    releases.warn_if_untested()  # a warning is an error here
    assert spmd.debugging.versions().untested == ()


def child(code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = fresh.run(["-W", "error", "-c", code], env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_release_of_tomorrow_is_imported_and_warns_once():
    printed = child(
        """
import sys, warnings
import jax, torch

torch.__version__ = torch.torch_version.TorchVersion("2.99.0")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import spmd_core
    import torch_xla
ours = [w for w in warned if "spmd_core is tested" in str(w.message)]
print(len(ours), "got torch 2.99.0." in str(ours[0].message), ours[0].filename)
"""
    )
    assert printed.split() == ["1", "True", "<string>"]


def test_without_many_overloads_and_modules_the_rest_works():
    printed = child(
        """
import sys
import jax.experimental.topologies, torch  # jax's topologies import mesh_utils

gone = {
    "mish", "cholesky", "_linalg_svd", "linalg_lstsq", "linalg_matrix_rank", "_unique2", "kron",
    "rrelu_with_noise", "take", "index_copy", "index_copy_", "repeat_interleave",
    "_upsample_bicubic2d_aa",
}
find = torch._ops._OpNamespace.__getattr__

def without(self, name):
    if self.name == "aten" and name in gone:
        raise AttributeError(name)
    return find(self, name)

torch._ops._OpNamespace.__getattr__ = without
for name in gone:
    vars(torch.ops.aten).pop(name, None)
blocked = ["layout", "custom_partitioning", "mesh_utils", "multihost_utils"]
blocked = [f"jax.experimental.{name}" for name in blocked] + ["jaxlib.mlir.dialects.sdy"]
for name in blocked:
    sys.modules[name] = None

import spmd_core as spmd

# torch and jax themselves use what is blocked.
torch._ops._OpNamespace.__getattr__ = find
for name in blocked:
    del sys.modules[name]
spmd.simulate(2)
spmd.use_spmd()
absent = spmd.debugging.versions().absent
print({name.split(".")[1] for name in absent if name.startswith("aten.")} >= gone)
print({name for name in absent if name.startswith("jax")} == set(blocked))
mesh = spmd.Mesh(range(2), (2,), ("data",))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    x = spmd.mark_sharding(torch.ones(4, 4).to("xla"), mesh, ("data", None))
    model(x).square().mean().backward()
    optimizer.step()
    spmd.sync()
print(bool(model[0].weight.isfinite().all()))
try:
    spmd.shard_as(x * 2, x * 3)[0].cpu()
except ImportError as error:
    print(error)
try:
    torch.fft.fft(x).cpu()
except ImportError as error:
    print(error)
"""
    ).splitlines()
    assert printed[:3] == ["True", "True", "True"]
    assert "this needs jaxlib.mlir.dialects.sdy.ShardingGroupOp, which jax" in printed[3]
    assert "this needs jax.experimental.layout." in printed[4]
