"""Checks of arguments: numbers and booleans, also by annotations; functions; objects of a kind."""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, get_args

Function = TypeVar("Function", bound=Callable[..., Any])


def require_int(
    name: str, value: object, *, least: int | None = None, most: int | None = None
) -> int:
    """The argument as an int.

    Args:
        name: the argument's.
        value: what was given.
        least: its least value.
        most: its highest value, beside a least one.

    Raises:
        TypeError: it is not a whole number; a float or a bool is not one, whatever its value.
        ValueError: it is less than `least`, or more than `most`.

    Example:
        >>> require_int("rounds", 2, least=1)
        2
    """
    limits = f" of at least {least}" if most is None else f" from {least} to {most}"
    rule = f"{name} is a whole number" + ("" if least is None else limits)
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        example = 1 if least is None else max(least, 1)
        raise TypeError(
            f"{rule}; got {value!r}, of type {type(value).__name__}. "
            f"Write for instance {name}={example}."
        )
    number = operator.index(value)  # type: ignore[arg-type]
    if least is not None and number < least:
        raise ValueError(f"{rule}; got {value!r}. Write {least} or more.")
    if most is not None and number > most:
        raise ValueError(f"{rule}; got {value!r}. Write {most} or less.")
    return number


def require_number(name: str, value: object, *, least: float | None = None) -> float:
    """The argument as a float.

    Raises:
        TypeError: it is not a real number; a bool is not one.
        ValueError: it is not a number (NaN), or less than `least`.

    Example:
        >>> require_number("scale", 2)
        2.0
    """
    rule = f"{name} is a number" + ("" if least is None else f" of at least {least:g}")
    is_number = not isinstance(value, (bool, str, bytes)) and hasattr(type(value), "__float__")
    if not is_number:
        raise TypeError(
            f"{rule}; got {value!r}, of type {type(value).__name__}. Write for instance {name}=1.5."
        )
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number) or (least is not None and number < least):
        raise ValueError(f"{rule}; got {value!r}. Write another number.")
    return number


def require_bool(name: str, value: object) -> bool:
    """The argument as a bool; 1 and 0 are accepted as True and False.

    Raises:
        TypeError: it is something else, whose truth value would not show what was meant.

    Example:
        >>> require_bool("wait", 1)
        True
    """
    is_switch = type(value).__name__ in ("bool", "bool_")  # numpy's, too
    if not is_switch and not (isinstance(value, int) and value in (0, 1)):
        raise TypeError(
            f"{name} is True or False; got {value!r}, of type {type(value).__name__}. "
            f"Write {name}=True or {name}=False."
        )
    return bool(value)


def require_callable(name: str, value: object) -> None:
    """Raises TypeError for an argument that cannot be called.

    Example:
        >>> require_callable("function", print)
    """
    if not callable(value):
        raise TypeError(
            f"{name} is a function; got {value!r}, of type {type(value).__name__}. Write a "
            "function itself, not its result."
        )


def require_kind(name: str, value: object, *kinds: type, write: str) -> None:
    """Raises TypeError for an argument that is an object of no such type.

    Args:
        name: the argument's.
        value: what was given.
        kinds: the types.
        write: what to write instead.

    Example:
        >>> require_kind("module", 5, dict, write="a dict")
        Traceback (most recent call last):
        TypeError: module is of type dict; got 5, of type int. Write a dict.
    """
    if not isinstance(value, kinds):
        shown = repr(value)
        raise TypeError(
            f"{name} is of type {' or '.join(kind.__name__ for kind in kinds)}; got "
            f"{shown if len(shown) <= 80 else f'{shown[:77]}...'}, of type {type(value).__name__}. "
            f"Write {write}."
        )


def checked(**least: float) -> Callable[[Function], Function]:
    """A decorator that checks the arguments annotated as `int`, `float` or `bool`.

    For a class, it checks those of its constructor. None is accepted if the annotation or the
    default allows it. Other annotations are ignored.

    Args:
        least: the least value of some of these arguments.

    Example:
        >>> @checked(times=1)
        ... def repeated(text: str, times: int = 2) -> str:
        ...     return text * times
        >>> repeated("ab")
        'abab'
    """

    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        signature = inspect.signature(function)
        checks = {
            name: check
            for name, parameter in signature.parameters.items()
            if (check := _check_of(name, parameter.annotation, least.get(name))) is not None
        }
        unknown = least.keys() - checks
        assert not unknown, f"no argument of {function} is a number named {unknown}"

        positional = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        by_position = [(i, checks[name]) for i, name in enumerate(positional) if name in checks]

        # Not by `Signature.bind`, which takes longer than what many of these functions do.
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for i, check in by_position:
                if i < len(args):
                    check(args[i])
            for name, value in kwargs.items():
                if name in checks:
                    checks[name](value)
            return function(*args, **kwargs)

        call.checks = checks  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _check_of(name: str, annotation: Any, least: float | None) -> Callable[[object], None] | None:
    """The check of an argument of this annotation; None if it has none."""
    kinds = set(get_args(annotation)) if isinstance(annotation, UnionType) else {annotation}
    takes_none = type(None) in kinds
    kinds.discard(type(None))

    def check(value: object) -> None:
        if value is None and takes_none:
            return
        if kinds == {bool}:
            require_bool(name, value)
        elif kinds == {int}:
            require_int(name, value, least=None if least is None else int(least))
        else:
            require_number(name, value, least=least)

    return check if kinds in ({bool}, {int}, {float}) else None
