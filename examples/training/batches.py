"""Batches of a run by their number, so that a run goes on at any place, counted in samples."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class NumberedBatches(Generic[Batch]):
    """An iterable of batches that are made by their number.

    `MpDeviceLoader` asks for its state after each batch, so that a resumed run has the next one.

    Args:
        make: makes the batch of a number, from 0.
        num_batches: the batches of a whole run.
        batch: samples in a batch, over all processes.
    """

    def __init__(self, make: Callable[[int], Batch], num_batches: int, *, batch: int) -> None:
        self._make, self._num_batches, self._batch = make, num_batches, batch
        self._first = self._num_given = 0

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        # Here and not in the generator, which begins with the first `next()`.
        self._num_given, self._first = self._first, 0
        return self._rest()

    def _rest(self) -> Iterator[Batch]:
        for number in range(self._num_given, self._num_batches):
            batch = self._make(number)
            self._num_given = number + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many samples were given: the same, whatever the number of processes."""
        return {"samples": self._num_given * self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration begin after those samples.

        Raises:
            ValueError: they fill no whole batches.
        """
        whole, rest = divmod(state["samples"], self._batch)
        if rest:
            raise ValueError(
                f"a run goes on behind a whole batch; got {state['samples']} samples and batches "
                f"of {self._batch}. Pass the batch size of the saved run."
            )
        self._first = self._num_given = whole
