"""Synthetic samples for benchmarks and tests: tokens and images that take a settable time.

Each is a map-style dataset that makes a whole batch at once, as torch's `DataLoader` asks it to.
The values depend on (seed, sample) alone.
"""

import abc
import time
from collections.abc import Sequence

import numpy as np
import torch

from spmd_core.arguments import checked, require_int


class Synthetic(torch.utils.data.Dataset[dict[str, torch.Tensor]], abc.ABC):
    """Samples that take a settable time.

    Args:
        num_samples: the dataset's length.
        seconds_per_batch: the least time that a batch takes, whatever its size; the process sleeps
            for the rest, as it would wait for a disk.
        seed: of the values.
    """

    @checked(num_samples=0, seconds_per_batch=0)
    def __init__(self, num_samples: int, *, seconds_per_batch: float = 0.0, seed: int = 0) -> None:
        self._num_samples = require_int("num_samples", num_samples, least=0)
        self._seconds_per_batch, self._seed = seconds_per_batch, require_int("seed", seed)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """The samples of a batch; takes `seconds_per_batch`."""
        start = time.perf_counter()
        batch = self._batch(np.asarray(indices, np.uint64))
        samples = [{name: x[row] for name, x in batch.items()} for row in range(len(indices))]
        left = self._seconds_per_batch - (time.perf_counter() - start)
        if left > 0:
            time.sleep(left)
        return samples

    @abc.abstractmethod
    def _batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples with these numbers, one for each row of each tensor."""

    def _numbers(self, indices: np.ndarray, count: int) -> np.ndarray:
        """`count` random numbers for each index, uint64, by a multiply-xorshift hash."""
        places = indices[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
        x: np.ndarray = places + np.uint64(self._seed % 2**32 << 20)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        return x >> np.uint64(32)


class SyntheticTokens(Synthetic):
    """Sequences of tokens: `input_ids` and `targets`, int64 of shape (T,), targets one ahead.

    Args:
        num_samples: the dataset's length.
        seq: tokens in a sequence (T), at most 2**24.
        vocab_size: tokens are from 0 to `vocab_size - 1`.
        seconds_per_batch, seed: see `Synthetic`.
    """

    @checked(num_samples=0, seconds_per_batch=0, seq=1, vocab_size=1)
    def __init__(
        self,
        num_samples: int,
        *,
        seq: int,
        vocab_size: int,
        seconds_per_batch: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(num_samples, seconds_per_batch=seconds_per_batch, seed=seed)
        self._seq = require_int("seq", seq, least=1, most=2**24)
        self._vocab_size = require_int("vocab_size", vocab_size, least=1, most=2**63 - 1)

    def _batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        numbers = self._numbers(indices, self._seq + 1) % np.uint64(self._vocab_size)
        tokens = torch.from_numpy(numbers.astype(np.int64))
        return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}


class SyntheticImages(Synthetic):
    """Images with labels: `pixels`, uint8 of shape (channels, size, size), and `label`, int64.

    Args:
        num_samples: the dataset's length.
        size: rows and columns, at most 2**14.
        channels: of an image, at most 1024.
        num_classes: labels are from 0 to `num_classes - 1`.
        seconds_per_batch, seed: see `Synthetic`.
    """

    @checked(num_samples=0, seconds_per_batch=0, size=1, channels=1, num_classes=1)
    def __init__(
        self,
        num_samples: int,
        *,
        size: int,
        channels: int = 3,
        num_classes: int = 1000,
        seconds_per_batch: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(num_samples, seconds_per_batch=seconds_per_batch, seed=seed)
        size = require_int("size", size, least=1, most=2**14)
        self._shape = (require_int("channels", channels, least=1, most=1024), size, size)
        self._num_classes = require_int("num_classes", num_classes, least=1, most=2**63 - 1)

    def _batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        pixels = self._numbers(indices, int(np.prod(self._shape))).astype(np.uint8)
        labels = indices.astype(np.int64) % self._num_classes
        return {
            "pixels": torch.from_numpy(pixels).unflatten(1, self._shape),
            "label": torch.from_numpy(labels),
        }
