"""Replaces what a Python function does, for those who imported its name before, too."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any


def _replacement(*args: Any, **kwargs: Any) -> Any:
    """Stands for the name in `_stub` that each replaced function has in its own module."""
    raise NotImplementedError


def _stub(*args: Any, **kwargs: Any) -> Any:
    return _replacement(*args, **kwargs)


def replace_body(function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes a function of a module call `make(original)`, where `original` does what it did.

    The function stays the same object, so `from module import function` before this call gets the
    replacement as well. Its signature and documentation stay. A function with a closure, such as a
    decorated one, gets the replacement in its module alone.

    Args:
        function: a function of a module.
        make: gets the original, and returns what to call instead.
    """
    if function.__closure__ is not None:
        replacement = functools.wraps(function)(make(function))
        setattr(sys.modules[function.__module__], function.__name__, replacement)
        return
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__, original.__doc__ = function.__kwdefaults__, function.__doc__
    original.__annotations__ = function.__annotations__
    name = f"_spmd_core_{function.__name__}"
    function.__globals__[name] = make(original)
    function.__code__ = _stub.__code__.replace(
        co_names=(name,), co_name=function.__name__, co_qualname=function.__qualname__
    )
    function.__defaults__, function.__kwdefaults__ = None, None
    function.__wrapped__ = original  # of which `inspect.signature` tells
