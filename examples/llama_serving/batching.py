"""In which sizes prompts are computed: padded to buckets, and several of a bucket together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SMALLEST_BUCKET = 32
# More tokens than this at once gain nothing: their products are bound by arithmetic, and no longer
# by reading the weights, which prompts that are computed together read once.
MOST_TOKENS = 512

T = TypeVar("T")


class PromptSizes:
    """The sizes of programs for prompts: few, as each is compiled before the server starts.

    Args:
        num_slots: requests that may be in flight.
        length: tokens of the longest prompt.

    Attributes:
        buckets: the tokens that prompts are padded to, ascending; the last one is `length`.

    Example:
        >>> sizes = PromptSizes(num_slots=4, length=96)
        >>> sizes.buckets, sizes.rows(32), sizes.rows(96)
        ((32, 64, 96), (1, 2, 3), (1,))
    """

    def __init__(self, *, num_slots: int, length: int) -> None:
        self._num_slots, self._length = num_slots, length
        self.buckets = tuple(_doubled(SMALLEST_BUCKET, length))

    def bucket(self, num_tokens: int) -> int:
        """What a prompt of 1 to `length` tokens is padded to."""
        return next(size for size in self.buckets if size >= num_tokens)

    def rows(self, bucket: int) -> tuple[int, ...]:
        """The numbers of prompts of a bucket that programs are for, ascending.

        Several prompts have no more tokens together than the longest one may have, so that those
        in flight never wait longer.
        """
        most = min(self._length, MOST_TOKENS) // bucket
        return tuple(_doubled(1, max(1, min(self._num_slots, most))))

    def all(self) -> list[tuple[int, int]]:
        """Each program's number of prompts, and their bucket."""
        return [(rows, bucket) for bucket in self.buckets for rows in self.rows(bucket)]

    def together(self, prompts: Iterable[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
        """Prompts in groups of one bucket, each of as many as one program takes.

        Args:
            prompts: in the order in which they came, which a bucket's groups keep.
            num_tokens: of a prompt.
        """
        by_bucket: dict[int, list[T]] = {}
        for prompt in prompts:
            by_bucket.setdefault(self.bucket(num_tokens(prompt)), []).append(prompt)
        for bucket, group in by_bucket.items():
            most = self.rows(bucket)[-1]
            yield from (group[i : i + most] for i in range(0, len(group), most))


def _doubled(first: int, last: int) -> Iterator[int]:
    """`first`, twice that and so on, and at last `last`."""
    while first < last:
        yield first
        first *= 2
    yield last
