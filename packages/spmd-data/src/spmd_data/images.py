"""Random transforms of images whose random numbers depend only on (seed, epoch, sample).

So the pixels are the same with any number of workers and of processes, and after a resume.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from spmd_core.arguments import checked, require_callable
from spmd_core.errors import DataError
from spmd_data.sampler import require_samples


class TransformedSamples(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose samples go through a transform, such as torchvision's `v2`.

    The transform draws from torch's default generator, as torchvision's do. For each sample the
    generator is seeded, and restored afterwards. The epoch comes with the index, from
    `ShardedSampler`; a plain index counts as epoch 0.

    Args:
        dataset: has a length, and samples by index.
        transform: takes a sample, such as (image, label), and returns one. torchvision's `v2`
            transforms take any structure, and leave labels as they are.
        seed: of the draws.

    Raises:
        TypeError: `dataset` has no samples by index, or `transform` is no function.
        DataError: a sample is read outside of the main thread of a process, where another thread
            may draw at the same time.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> pixels = TensorDataset(torch.zeros(4, 3, 8, 8))
        >>> noisy = TransformedSamples(pixels, lambda sample: sample[0] + torch.rand(1), seed=3)
        >>> bool((noisy[1] == noisy[1]).all()), bool((noisy[1] == noisy[2]).any())
        (True, False)
    """

    @checked()
    def __init__(self, dataset: Any, transform: Callable[[Any], Any], *, seed: int = 0) -> None:
        require_samples(dataset)
        require_callable("transform", transform)
        self._dataset, self._transform, self._seed = dataset, transform, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise DataError(
                "random transforms seed the process's generator for each sample, which no other "
                "thread may draw from meanwhile; got a call in the thread "
                f"{threading.current_thread().name!r}. Read samples in worker processes: "
                "DataLoader(..., num_workers=1) or more."
            )
        number, epoch = int(index), getattr(index, "epoch", 0)
        sample = self._dataset[number]
        text = f"{self._seed}/{epoch}/{number % len(self)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            return self._transform(sample)
        finally:
            generator.set_state(before)
