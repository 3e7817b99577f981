"""Tests former_names: each old name is its new object, and the warning's advice is right."""

import importlib
import pickle
import pickletools
import warnings

import pytest
import torch

import spmd_core as spmd
from spmd_core import former_names
from spmd_core.former_names import FORMER, PICKLED


def old(name):
    """The object that the former name gives, and the warning's text."""
    with pytest.warns(DeprecationWarning, match=f"spmd_core.{name} goes with the next") as caught:
        found = eval(f"spmd.{name}", {"spmd": spmd})
    assert len(caught) == 1 and caught[0].filename == "<string>"
    return found, str(caught[0].message)


def new(dotted):
    """The object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(FORMER))
def test_a_former_name_works_and_says_the_new_one(name):
    found, text = old(name)
    former = FORMER[name]
    module = importlib.import_module(former.module)
    assert found is (module if former.attribute is None else getattr(module, former.attribute))
    place = former.now.split("(")[0].split(",")[0]
    assert f"it is now {former.now}. Write that." in text
    if former.now == f"{former.module}.{name}":  # in another public module
        assert new(place) is found
    elif place.startswith("torch_xla."):
        assert callable(new(place))
    elif place.startswith("spmd_core."):
        assert name not in spmd.__all__ and callable(new(place))


def test_no_name_is_both():
    assert set(FORMER).isdisjoint(spmd.__all__)
    with pytest.raises(AttributeError, match="module 'spmd_core' has no attribute 'mark_shardin'"):
        _ = spmd.mark_shardin


def test_an_import_is_told_once():
    program = "from spmd_core import annotate"
    with pytest.warns(
        DeprecationWarning, match=r"spmd_core\.annotate .*spmd_core\.constrain"
    ) as told:
        exec(program, namespace := {})
    assert len(told) == 1 and namespace["annotate"] is spmd.constrain


def test_verbs_that_became_options_do_as_before(mesh_1d):
    t = torch.ones(8, device="xla")
    assert former_names.apply_sharding(t, spmd.ShardingSpec(mesh_1d, ("x",))) is t
    marked = former_names.mark_sharding_with_gradients(t * 2, mesh_1d, ("x",))
    assert marked.partition_spec == t.partition_spec == ("x",)
    with pytest.raises(NotImplementedError, match="the cpu platform counts nothing"):
        former_names.memory_info()


@pytest.mark.parametrize("name", sorted(PICKLED))
def test_a_pickle_finds_its_class_without_a_warning(name):
    cls = getattr(importlib.import_module(FORMER[name].module), name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = pickle.dumps(cls)
        assert pickle.loads(data) is cls
    assert "spmd_core" in {arg for _, arg, _ in pickletools.genops(data)}
