"""The checks of a test of lowerings share a program."""

from collections.abc import Generator
from typing import Any

import pytest

import oracle


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Compares at the end of the test; each example of a property by itself."""
    if getattr(pyfuncitem.obj, "is_hypothesis_test", False):
        return (yield)
    with oracle.in_one_program():
        return (yield)
