"""torch_xla.utils.utils ("xu"): small helpers for training scripts."""

import os
from collections.abc import Iterator
from typing import Any

from spmd_core.arguments import checked, require_callable, require_kind


class SampleGenerator:
    """An iterable that yields the same data `sample_count` times: a loader for benchmarks."""

    @checked(sample_count=0)
    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count = data, sample_count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data for _ in range(self._sample_count))

    def __len__(self) -> int:
        return self._sample_count


def getenv_as(name: str, type: Any, defval: Any = None) -> Any:
    """Environment variable `name` as a value of `type`, or `defval` if it is not set.

    A bool is True for 'true' and for a positive number.

    Raises:
        TypeError: `name` is no text, or `type` no type or function.
        ValueError: the variable has no such value.
    """
    require_kind("name", name, str, write="the variable's name")
    require_callable("type", type)
    value = os.environ.get(name)
    if value is None:
        return defval
    if type is bool:
        return value.lower() == "true" or (value.isdigit() and int(value) > 0)
    try:
        return type(value)
    except ValueError as error:
        raise ValueError(
            f"the variable {name} is read by {type.__name__}; got {value!r}. Correct it, or "
            "unset it."
        ) from error
