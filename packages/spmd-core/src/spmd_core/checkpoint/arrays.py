"""What reads the chunks of arrays: of this package's own databases, or by tensorstore."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Array:
    """An array on the disk.

    Attributes:
        shape: of all of it.
        dtype: numpy's.
        chunks: the shape of its chunks, of which the last one along a dim has less of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]


class Arrays(Protocol):
    """The arrays of a step.

    Attributes:
        num_threads: so many may read at a time.
    """

    num_threads: int

    def open(self, names: Iterable[str]) -> None:
        """Begins to look for arrays, so that `array` need not wait for one after another."""

    def array(self, name: str) -> Array:
        """An array.

        Raises:
            OSError, ValueError: it is missing or damaged.
        """

    def chunk(
        self, name: str, number: tuple[int, ...], use: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """Reads a chunk, and compares it with its checksum. By any thread; waits.

        Args:
            name: of the array, which `array` has found.
            number: of the chunk along each dim.
            use: gets the chunk, which is overwritten when it returns. What lies beyond the array
                may be missing.

        Raises:
            OSError, ValueError: it is missing, or its checksum is not that of its data.
        """
