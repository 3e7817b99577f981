"""Checks of arguments that are whole numbers: an int, or what Python takes for an index."""

import operator


def require_int(name: str, value: object, *, least: int | None = None) -> int:
    """The argument as an int.

    Raises:
        TypeError: it is no whole number; a float or a bool is none, whatever its value.
        ValueError: it is less than `least`.

    Example:
        >>> require_int("rounds", 2, least=1)
        2
    """
    rule = f"{name} is a whole number" + ("" if least is None else f" of at least {least}")
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        example = 1 if least is None else max(least, 1)
        raise TypeError(
            f"{rule}; got {value!r}, of type {type(value).__name__}. "
            f"Write for instance {name}={example}."
        )
    number = operator.index(value)  # type: ignore[arg-type]
    if least is not None and number < least:
        raise ValueError(f"{rule}; got {value!r}. Write {least} or more.")
    return number
