"""Every public name of the three packages, listed in `data/public_names.txt`, can be imported."""

import importlib
import operator
import pkgutil
from pathlib import Path
from types import ModuleType

import spmd_core as spmd
import spmd_core.checkpoint  # for its extra's users: `spmd_core` does not import it
import spmd_data
import torch_xla

LISTED = (Path(__file__).parents[1] / "data" / "public_names.txt").read_text().split()
# Modules that users reach as attributes of the package: `spmd.debugging.collectives`.
MODULES = [
    "checkpoint",
    "control_flow",
    "debugging",
    "debugging.profiler",
    "distributed",
    "dtensor",
    "errors",
    "manual",
    "metrics",
]


def public_names(module, name):
    """`name.x` for each attribute `x` of a module that is neither private nor a module."""
    return {
        f"{name}.{attribute}"
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not isinstance(value, ModuleType)
    }


def found():
    names = {f"spmd_core.{name}" for name in MODULES}
    for name in MODULES:
        names |= public_names(operator.attrgetter(name)(spmd), f"spmd_core.{name}")
    for info in pkgutil.walk_packages(torch_xla.__path__, "torch_xla."):
        names |= {info.name, *public_names(importlib.import_module(info.name), info.name)}
    names |= public_names(torch_xla, "torch_xla")
    # Some names are torch's, and imported when they are asked for.
    names |= {f"spmd_core.{name}" for name in spmd.__all__ if hasattr(spmd, name)}
    names |= {f"spmd_core.dtensor.{n}" for n in spmd.dtensor.__all__ if hasattr(spmd.dtensor, n)}
    return names | public_names(spmd, "spmd_core") | public_names(spmd_data, "spmd_data")


def test_every_listed_name_is_there():
    assert sorted(set(LISTED) - found()) == []


def test_the_top_level_is_what_a_person_can_hold():
    assert len(spmd.__all__) == len(set(spmd.__all__)) <= 60
    assert public_names(spmd, "spmd_core") <= {f"spmd_core.{name}" for name in spmd.__all__}


def test_no_name_comes_unnoticed():
    names = public_names(spmd, "spmd_core") | public_names(spmd_data, "spmd_data")
    assert sorted(names - set(LISTED)) == []
