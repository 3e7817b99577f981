"""Every docstring example runs and prints the output that it shows."""

import doctest
import importlib
import pkgutil

import pytest

import spmd_core as spmd

MODULES = (
    "spmd_core",
    *(
        module.name
        for module in pkgutil.walk_packages(spmd.__path__, "spmd_core.")
        if module.name != "spmd_core.plan"  # Its import gives the function.
    ),
    "spmd_data.loader",
    "spmd_data.matching",
    "torch_xla.experimental.assume_pure",
    "torch_xla.experimental.gradient_accumulation",
    "torch_xla.experimental.scan_layers",
    "examples.gpt2.config",
    "examples.llama_tp.shardings",
    "examples.training.knobs",
    "examples.training.text",
    "examples.gpt2.presets",
    "examples.gpt2.shardings",
    "examples.gpt2.train",
    "benchmarks.report",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if spmd.global_runtime_device_count() != 8:
        pytest.skip("the examples have eight devices")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    assert (
        sum(
            len(test.examples)
            for name in MODULES
            for test in finder.find(importlib.import_module(name))
        )
        >= 15
    )
