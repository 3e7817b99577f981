"""The exception tree: what catches each error, and that the drawing in errors.py is true."""

import inspect
import re

import pytest

from spmd_core import errors

TREE = {
    "SpmdError": (Exception,),
    "MeshError": (ValueError,),
    "PartitionSpecError": (ValueError,),
    "DataError": (ValueError,),
    "ShardError": (RuntimeError, ValueError),
    "WrapError": (RuntimeError, ValueError),
    "DeviceMismatchError": (RuntimeError,),
    "NotInSpmdModeError": (RuntimeError,),
    "HostFallbackError": (RuntimeError,),
    "IndexRangeError": (IndexError, RuntimeError),
    "DeviceMemoryError": (RuntimeError,),
    "ProgramError": (RuntimeError,),
    "ControlFlowError": (RuntimeError,),
    "CaptureError": (RuntimeError,),
    "ProcessError": (RuntimeError,),
    "VerificationError": (RuntimeError,),
    "AutoShardingError": (RuntimeError,),
    "CheckpointError": (RuntimeError, ValueError),
    "PlanError": (ValueError, RuntimeError),
    "PlanReadError": (RuntimeError,),
    "UnsupportedOpError": (NotImplementedError,),
}


def defined_classes() -> dict[str, type]:
    return {name: value for name, value in vars(errors).items() if inspect.isclass(value)}


def test_the_module_defines_exactly_the_tree():
    assert set(defined_classes()) == set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_caught_as_spmd_error_and_as_its_builtin(name):
    error = defined_classes()[name]
    with pytest.raises(errors.SpmdError, match=r"^the message$"):
        raise error("the message")
    for builtin in TREE[name]:
        with pytest.raises(builtin):
            raise error("the message")


def test_no_error_is_caught_as_another_one():
    leaves = [error for name, error in defined_classes().items() if name != "SpmdError"]
    assert all(error.__bases__[0] is errors.SpmdError for error in leaves)


@pytest.mark.parametrize("name", TREE)
def test_each_error_says_in_one_line_what_it_means(name):
    doc = inspect.getdoc(defined_classes()[name])
    assert doc.endswith(".")
    assert "\n" not in doc


def test_the_drawing_names_every_error_with_its_builtin():
    drawn = dict(re.findall(r"[├└]── (\w+) +\(([\w, ]+)\)", errors.__doc__))
    assert drawn == {
        name: ", ".join(builtin.__name__ for builtin in builtins)
        for name, builtins in TREE.items()
        if name != "SpmdError"
    }
