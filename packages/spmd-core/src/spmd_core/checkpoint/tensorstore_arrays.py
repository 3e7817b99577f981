"""Reads chunks by tensorstore: of stores of objects, and of databases that others have written."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorstore as ts

from spmd_core.checkpoint.arrays import Array
from spmd_core.checkpoint.remote import CONTEXT, Folder, url


class TensorstoreArrays:
    """The arrays of a database, as `Arrays` has them.

    Args:
        folder: of the database.
    """

    # Each waits for one chunk, which may come from far away.
    num_threads = 16

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
                # Enough for a disk's bandwidth; each thread keeps memory for what it reads.
                "file_io_concurrency": {"limit": 4},
            },
            CONTEXT,
        )
        self._open: dict[str, Any] = {}

    def open(self, names: Iterable[str]) -> None:
        """See `Arrays`."""
        for name in {*names} - self._open.keys():
            database = {
                "driver": "ocdbt",
                "base": f"{url(self._folder)}/",
                "path": f"{name}/",
                "cache_pool": "cache_pool#ocdbt",
            }
            spec = {
                "driver": "zarr3",
                "kvstore": database,
                "fill_missing_data_reads": False,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            self._open[name] = ts.open(spec, read=True, context=self._context)

    def array(self, name: str) -> Array:
        """See `Arrays`."""
        found = self._opened(name)
        return Array(
            tuple(found.shape),
            found.dtype.numpy_dtype,
            tuple(found.chunk_layout.read_chunk.shape or ()),
        )

    def chunk(
        self, name: str, number: tuple[int, ...], use: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """See `Arrays`."""
        found = self._opened(name)
        sizes = found.chunk_layout.read_chunk.shape or ()
        starts = [i * size for i, size in zip(number, sizes)]
        ends = [min(i + size, of) for i, size, of in zip(starts, sizes, found.shape)]
        if use is None:  # for one element, all of its chunk is read and compared
            ends = [start + 1 for start in starts]
        read: np.ndarray = found[tuple(map(slice, starts, ends))].read().result()
        if use is not None:
            use(read)

    def _opened(self, name: str) -> Any:
        self.open([name])
        return self._open[name].result()
