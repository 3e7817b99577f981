"""Tests imports of modules of PyTorch/XLA that are not here: one sentence says what to use."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import spmd_core as spmd
import torch_xla
from torch_xla import _absent


@pytest.mark.parametrize("name", sorted(_absent._INSTEAD))
def test_an_import_says_what_to_use(name):
    with pytest.raises(
        ModuleNotFoundError, match=rf"^{re.escape(name)} is not in this torch_xla.*\. \w.*\.$"
    ):
        importlib.import_module(name)
    assert name not in sys.modules


def test_every_form_of_import():
    statements = (
        "import torch_xla.stablehlo",
        "from torch_xla import stablehlo",
        "from torch_xla.stablehlo import exported_program_to_stablehlo",
        "from torch_xla.experimental.custom_kernel import flash_attention",
    )
    for statement in statements:
        with pytest.raises(ImportError, match="is not in this torch_xla") as found:
            exec(statement)
        assert type(found.value) is _absent.AbsentModuleError


def test_other_names_get_pythons_error():
    for name in ("torch_xla.nonsense", "nonsense_xla"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)
    assert importlib.util.find_spec("torch_xla.runtime") is not None


def test_no_module_of_the_table_is_here():
    package = Path(torch_xla.__file__).parent
    for name in _absent._INSTEAD:
        path = package.joinpath(*name.split(".")[1:])
        assert not path.exists() and not path.with_suffix(".py").exists()


def test_what_it_names_exists():
    texts = " ".join(_absent._INSTEAD.values())
    names = set(re.findall(r"(?:torch_xla|spmd_core|torch)\.[\w.]*\w", texts))
    assert len(names) > 15
    for name in names:
        parts = name.split(".")
        found = {"spmd_core": spmd, "torch_xla": torch_xla}.get(parts[0])
        if found is None:
            found = importlib.import_module("torch")
        for n, part in enumerate(parts[1:], start=2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:n]))
            found = getattr(found, part)


@pytest.mark.parametrize(
    "name",
    [
        "save_as_stablehlo",
        "save_torch_model_as_stablehlo",
        "xm.send",
        "xm.recv",
        "xm.all_gather_bucketized",
        "xm.reduce_scatter_bucketized",
        "xm.all_reduce_bucketized_gradients",
    ],
)
def test_functions_that_are_refused(name):
    found = torch_xla
    for part in name.split("."):
        found = getattr(found, part)
    with pytest.raises(
        NotImplementedError, match=rf"{name.removeprefix('xm.')} .*not available .*(Use|Leave) "
    ):
        found()
