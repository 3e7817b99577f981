"""The position in a wrapped loader: recorded for each batch, and restored on resume.

There are four kinds of wrapped loaders. They differ in what a saved state contains, and in how an
iteration starts at a state:

- *stateful*: it has `state_dict` and `load_state_dict`. It is asked after each batch that is read
  ahead; one that is not read ahead only when the training loop asks;
- *sharded*: a torch DataLoader whose sampler counts samples of all processes (`ShardedSampler`);
- *indexed*: a torch DataLoader over a map-style dataset with any other sampler. Indices are
  skipped, no sample is loaded;
- *read*: any other iterable. Its batches are read and dropped.
"""

import abc
import contextlib
import copy
import itertools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from spmd_core.errors import DataError
from spmd_data.saved_states import check_counts, check_same

FORMAT = 1


class Source(abc.ABC):
    """A wrapped loader with its epochs and positions.

    Attributes:
        epoch: the number of the epoch that the next iteration begins or continues.
    """

    kind: str

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.epoch = 0
        self._resume: dict[str, Any] | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin after the batches that `state` counts.

        Raises:
            DataError: `state` is of another kind of loader, dataset, seed or batch size, or not a
                state.
        """
        if state.get("format") != FORMAT or state.get("kind") != self.kind:
            raise DataError(
                f"a loader goes on from a state of its own kind; got format {state.get('format')!r}"
                f" and kind {state.get('kind')!r} for a loader of format {FORMAT} and kind "
                f"{self.kind!r}. Wrap the same kind of loader as in the saved run."
            )
        missing = [key for key in ("epoch", "batches", "source") if key not in state]
        if missing:
            raise DataError(
                "a loader's state has an epoch, batches and a source; got one without "
                f"{', '.join(missing)}. Pass what state_dict() returned."
            )
        check_counts(state, ("epoch", "batches"), who="a loader")
        self._check(state)
        self._load(state)
        self.epoch = state["epoch"]
        self._resume = dict(state)

    @abc.abstractmethod
    def begin(self) -> tuple[Iterator[Any], dict[str, Any]]:
        """Begins an iteration at the loaded state, if any; returns it and the state there.

        The order of shuffled indices is drawn here, in the caller's thread: the order of the draws
        must not depend on timing.
        """

    def after_read(self) -> Any:
        """What to record after a batch was read, or at the end; an argument of `advanced`."""
        return None

    def at_beginning(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state before the first batch; `state` is that of the iteration's beginning."""
        return state

    def advanced(self, state: dict[str, Any], number: int, noted: Any) -> dict[str, Any]:
        """The state after a batch.

        Args:
            state: of the iteration's beginning.
            number: how many batches the iteration has read, up to this one.
            noted: the result of `after_read` for it.
        """
        return {**state, "batches": state["batches"] + number}

    def row_mask(self, state: dict[str, Any], noted: Any, count: int) -> torch.Tensor | None:
        """Which rows of a batch are samples, not the sampler's padding; None if all are.

        Args:
            state: of the iteration's beginning.
            noted: the result of `after_read` for the batch.
            count: the number of rows.
        """
        return None

    def refuse_empty(self, state: dict[str, Any], num_dropped: int) -> None:
        """Called when an iteration has yielded no batch.

        Args:
            state: of the iteration's beginning.
            num_dropped: the number of batches that were read and left out.

        Raises:
            DataError: it did not begin at the end of an epoch.
        """
        if state["batches"]:
            return
        if num_dropped:
            raise DataError(
                f"an epoch has at least one batch; got {num_dropped} that uneven_batch='drop' left "
                "out. Choose a batch size that divides by the number of shards, or another policy, "
                "such as 'pad'."
            )
        kind = type(self._loader).__name__
        once = (
            f", an iterator, which gives its batches once (this is iteration {self.epoch + 1}). "
            "Wrap what makes a new one at each iter(): a list, a DataLoader, a class with __iter__."
        )
        raise DataError(
            f"an epoch has at least one batch; got none from a {kind}"
            + (once if isinstance(self._loader, Iterator) else ". Look at its dataset and sampler.")
        )

    def end_epoch(self) -> None:
        """Counts an epoch of which every batch was yielded."""
        self.epoch += 1

    def state(self) -> dict[str, Any]:
        """The state of an iteration that would begin now."""
        if self._resume is not None:
            return self._resume
        return {
            "format": FORMAT,
            "kind": self.kind,
            "epoch": self.epoch,
            "batches": 0,
            "samples": 0,
            "source": self._fingerprint(),
        }

    def _taken(self) -> dict[str, Any]:
        """Removes and returns the loaded state."""
        state, self._resume = self.state(), None
        return state

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises DataError if a state is of other data."""
        check_same(
            self._fingerprint(),
            state["source"],
            who="a loader",
            advice="Give the dataset, sampler and batch size of the saved run.",
        )

    def _load(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most kinds do nothing
        """What a kind of source does with a state that has passed the check."""

    def _fingerprint(self) -> dict[str, Any]:
        """What must be equal on resume."""
        return {}


def require_batches(loader: object) -> None:
    """Raises TypeError for a loader that gives no batches when it is iterated.

    Texts and mappings give characters and keys, and a class gives nothing.
    """
    gives_batches = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not gives_batches or isinstance(loader, str | bytes | Mapping | type):
        shown = " ".join(repr(loader).split())
        raise TypeError(
            "a loader gives batches when it is iterated; "
            f"got {shown if len(shown) <= 80 else f'{shown[:77]}...'}, of type "
            f"{type(loader).__name__}. Pass for instance a DataLoader."
        )


def source_of(loader: Iterable[Any], *, is_read_ahead: bool) -> Source:
    """The source of the loader's kind."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader, is_read_ahead=is_read_ahead)
    # A subclass with its own `__iter__`, such as trainers have, may not follow its sampler.
    if (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    ):
        sampler = _sampler_of(loader)
        if all(hasattr(sampler, name) for name in _PROTOCOL):
            return ShardedSource(loader)
        return IndexedSource(loader)
    return ReadSource(loader)


class StatefulSource(Source):
    """A loader that reports its own position, such as torchdata's StatefulDataLoader."""

    kind = "stateful"

    def __init__(self, loader: Iterable[Any], *, is_read_ahead: bool) -> None:
        super().__init__(loader)
        self._is_read_ahead = is_read_ahead

    def begin(self) -> tuple[Iterator[Any], dict[str, Any]]:
        batches = iter(self._loader)
        if self._resume is None and not self._is_read_ahead:
            return batches, super().state()
        return batches, self._taken()

    def after_read(self) -> Any:
        return self._asked() if self._is_read_ahead else None

    def at_beginning(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._is_read_ahead or state["batches"] else self.advanced(state, 0, None)

    def advanced(self, state: dict[str, Any], number: int, noted: Any) -> dict[str, Any]:
        own = noted if self._is_read_ahead else self._asked()
        return {**super().advanced(state, number, noted), "samples": None, "source": own}

    def refuse_empty(self, state: dict[str, Any], num_dropped: int) -> None:
        """Does not raise: the loader may have been at the end of its epoch."""

    def state(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        return {**super().state(), "samples": None, "source": self._asked()}

    def _asked(self) -> Any:
        try:
            # A copy: the loader may return the object in which it counts.
            return copy.deepcopy(self._loader.state_dict())  # type: ignore[attr-defined]
        except AttributeError as error:  # Accelerate's loaders raise it about the one they wrap
            raise DataError(
                "a loader with state_dict is asked for its state after each batch that is read "
                f"ahead; got an AttributeError from that of a {type(self._loader).__name__}: "
                f"{error}. Pass prefetch=0, which does not ask."
            ) from error

    def _check(self, state: Mapping[str, Any]) -> None:
        """Left to the loader itself."""

    def _load(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(copy.deepcopy(state["source"]))  # type: ignore[attr-defined]


class _IndexStream:
    """Replaces the batch sampler of a DataLoader: skips indices, and counts them."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.num_skipped = 0  # batches that an iteration skips
        self.current = _Indices(iter(()), 0)

    def __iter__(self) -> "_Indices":
        self.current = _Indices(iter(self._sampler), self.num_skipped)
        return self.current

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class _Indices(Iterator[Any]):
    """The indices of one iteration.

    Attributes:
        num_given: the number of indices in the batches that were skipped or counted.
    """

    def __init__(self, batches: Iterator[Any], num_skipped: int) -> None:
        self._batches, self._num_skipped = batches, num_skipped
        self._is_primed = False
        self.num_given = 0
        # Sizes of the batches that the DataLoader has requested and not returned yet, as its
        # workers read ahead.
        self._sizes: deque[int] = deque()

    def prime(self) -> None:
        """Draws the order, and skips the first batches."""
        if self._is_primed:
            return
        skipped = list(map(_size, itertools.islice(self._batches, self._num_skipped)))
        if len(skipped) < self._num_skipped:
            raise DataError(
                "a saved position must lie in the epoch; got "
                f"{self._num_skipped} batches of an epoch of {len(skipped)}. "
                "Give the dataset and sampler of the saved run."
            )
        self.num_given, self._is_primed = sum(skipped), True
        self._batches = itertools.chain(list(itertools.islice(self._batches, 1)), self._batches)

    def __next__(self) -> Any:
        self.prime()
        indices = next(self._batches)
        self._sizes.append(_size(indices))
        return indices

    def note(self) -> int:
        """Counts a batch that the DataLoader has returned; returns the number of indices so far."""
        if self._sizes:
            self.num_given += self._sizes.popleft()
        return self.num_given


class IndexedSource(Source):
    """A torch DataLoader over a map-style dataset, with any sampler."""

    kind = "indexed"
    _loader: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._reading: DataLoader[Any] | None = None
        self._stream = _IndexStream(())

    def begin(self) -> tuple[Iterator[Any], dict[str, Any]]:
        is_resumed = self._resume is not None
        state = self._taken()
        reading = self._reading_loader()
        self._prepare(state)
        # A continued epoch made its draws when it began.
        with torch.random.fork_rng(devices=(), enabled=is_resumed):
            if is_resumed:
                self._set_generators(state.get("generators", {}))
            batches = iter(reading)
            # After the DataLoader's own draw, as in a plain iteration.
            self._stream.current.prime()
        return batches, state

    def after_read(self) -> Any:
        return self._stream.current.note()

    def advanced(self, state: dict[str, Any], number: int, noted: Any) -> dict[str, Any]:
        return {**super().advanced(state, number, noted), "samples": noted}

    def state(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        generators = {name: made.get_state() for name, made in self._generators().items()}
        return {**super().state(), "generators": generators}

    def _prepare(self, state: dict[str, Any]) -> None:
        """Makes the iteration begin at a state."""
        self._stream.num_skipped = state["batches"]

    def _reading_loader(self) -> DataLoader[Any]:
        """A copy of the DataLoader whose indices go through `_stream`; the user's is unchanged.

        The copy is kept if its workers are persistent.
        """
        if self._reading is None or not self._loader.persistent_workers:
            name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
            self._stream = _IndexStream(getattr(self._loader, name))
            self._reading = copy.copy(self._loader)
            # Bypasses the class's `__setattr__`, which refuses a new sampler after initialization.
            self._reading.__dict__[name] = self._stream
        return self._reading

    def _generators(self) -> dict[str, torch.Generator]:
        """The generators from which the order, and the workers' seeds, are drawn."""
        found = {"default": torch.default_generator}
        for name, owner in (("sampler", _sampler_of(self._loader)), ("loader", self._loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[name] = generator
        return found

    def _set_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        generators = self._generators()
        for name, state in states.items():
            generators[name].set_state(state)

    def _fingerprint(self) -> dict[str, Any]:
        dataset, sampler = self._loader.dataset, _sampler_of(self._loader)
        found = {
            "num_samples": len(dataset),  # type: ignore[arg-type]
            "batch_size": getattr(self._loader.batch_sampler, "batch_size", None),
            "sampler": type(sampler).__name__,
        }
        if isinstance(getattr(dataset, "_fingerprint", None), str):  # of Hugging Face's datasets
            found["dataset"] = dataset._fingerprint  # type: ignore[attr-defined]
        for name, generator in self._generators().items():
            if name != "default":  # the default one is seeded for many reasons
                found[f"seed of the {name}"] = generator.initial_seed()
        return found


class ShardedSource(IndexedSource):
    """A torch DataLoader whose sampler counts samples over all processes.

    The sampler's state does not depend on the number of processes, so an epoch may be continued
    with another number.
    """

    kind = "sharded"

    def advanced(self, state: dict[str, Any], number: int, noted: Any) -> dict[str, Any]:
        samples = state["samples"] + noted * self._sampler.num_parts
        return {**Source.advanced(self, state, number, noted), "samples": samples}

    def row_mask(self, state: dict[str, Any], noted: Any, count: int) -> torch.Tensor | None:
        if not hasattr(self._sampler, "row_mask"):
            return None
        first = state["samples"] // self._sampler.num_parts + noted - count
        return torch.as_tensor(self._sampler.row_mask(first, count))

    def end_epoch(self) -> None:
        self._sampler.set_epoch(self._sampler.epoch + 1)

    def state(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        return {**Source.state(self), **self._sampler.state_dict(), "kind": self.kind}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(
            {name: state[name] for name in ("format", "epoch", "samples", "source")}
        )

    def _prepare(self, state: dict[str, Any]) -> None:
        """Nothing to do: the sampler keeps its own position."""

    @property
    def _sampler(self) -> Any:
        return _sampler_of(self._loader)

    def _fingerprint(self) -> dict[str, Any]:
        return self._sampler.state_dict()["source"]


class ReadSource(Source):
    """Any iterable of batches."""

    kind = "read"

    def begin(self) -> tuple[Iterator[Any], dict[str, Any]]:
        state = self._taken()
        batches = iter(self._loader)
        if state["batches"]:
            warnings.warn(
                f"a {type(self._loader).__name__} has no position to go to, so "
                f"{state['batches']} batches are read and dropped. A torch DataLoader over a "
                "map-style dataset goes there without loading, and a loader with state_dict and "
                "load_state_dict by itself.",
                RuntimeWarning,
                stacklevel=4,
            )
            dropped = sum(1 for _ in itertools.islice(batches, state["batches"]))
            if dropped < state["batches"]:
                raise DataError(
                    f"a saved position must lie in the epoch; got {state['batches']} batches of "
                    f"an iterable that gave {dropped}. Give the data of the saved run."
                )
        return batches, state

    def state(self) -> dict[str, Any]:
        # How many samples a batch has is not known.
        return {**super().state(), "samples": None} if self._resume is None else self._resume

    def _fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": type(self._loader).__name__}
        if isinstance(self._loader, Sized):
            with contextlib.suppress(TypeError):  # a DataLoader over a dataset without a length
                found["num_batches"] = len(self._loader)
        if isinstance(self._loader, DataLoader):
            found["batch_size"] = self._loader.batch_size
        return found


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """The source of a DataLoader's indices: a sampler, or a batch sampler without a known one."""
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _size(indices: Any) -> int:
    return len(indices) if hasattr(indices, "__len__") else 1


# The methods of samplers whose positions count samples over all processes: see `ShardedSampler`.
_PROTOCOL = ("num_parts", "part", "epoch", "start", "set_epoch", "state_dict", "load_state_dict")
