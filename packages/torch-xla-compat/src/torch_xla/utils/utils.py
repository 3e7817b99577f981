"""Small helpers of training scripts ("xu")."""

import os
from collections.abc import Iterator
from typing import Any


class SampleGenerator:
    """An iterable that gives the same data `sample_count` times: a loader for benchmarks."""

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count = data, sample_count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data for _ in range(self._sample_count))

    def __len__(self) -> int:
        return self._sample_count


def getenv_as(name: str, type: Any, defval: Any = None) -> Any:
    """An environment variable as a value of `type`; booleans are 'true' or a positive number."""
    value = os.environ.get(name)
    if value is None:
        return defval
    if type is bool:
        return value.lower() == "true" or (value.isdigit() and int(value) > 0)
    return type(value)
