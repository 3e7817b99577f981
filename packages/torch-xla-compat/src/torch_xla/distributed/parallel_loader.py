"""Data loaders with torch_xla's names, arguments and exceptions, over `spmd_data`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import spmd_core as spmd
import spmd_data
from spmd_core.arguments import checked, require_int, require_kind
from spmd_core.errors import DataError
from spmd_core.steps import structures
from spmd_core.tensor.logical_device import as_device
from spmd_data.loader import MOST_BATCHES, MOST_THREADS
from spmd_data.placement import as_target
from spmd_data.sources import require_batches
from torch_xla.core import xla_model

_PREFETCH = 8
# The numbers that both loaders take, with the least value of each.
_LEAST = {
    "batchdim": 0,
    "batches_per_execution": 1,
    "device_prefetch_size": 0,
    "host_to_device_transfer_threads": 1,
    "loader_prefetch_size": 0,
}
_NAMES = frozenset({*_LEAST, "input_sharding"})


class MpDeviceLoader:
    """Wraps a loader and yields its batches on the device, sharded, prefetching the next.

    Ends a step before each batch. A loader with a `state_dict` is never read ahead: trainers ask it
    for its state between two batches. Public attributes that this class lacks are read from the
    loader, such as `dataset` and `batch_size`, and its `state_dict`.

    Args:
        loader: any iterable of batches.
        device: a device, such as `torch_xla.device()`.
        input_sharding: a ShardingSpec, or a dict with one (or None) for each key of a dict batch. A
            tensor without a spec is replicated.
        batches_per_execution: number of batches whose steps are sent to the device as one program.
        device_prefetch_size: number of batches that may be ahead of the training loop.
        host_to_device_transfer_threads: number of threads that move batches to the device; the
            order is kept.
        loader_prefetch_size, batchdim: accepted; `device_prefetch_size` is the only bound here.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a number is too small or too large.
        RuntimeError: there is no such device.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str, **kwargs: Any) -> None:
        unknown = set(kwargs) - _NAMES
        if unknown:
            raise TypeError(
                f"MpDeviceLoader takes {', '.join(sorted(_NAMES))}; "
                f"got {', '.join(sorted(unknown))}. Remove what is not in the list."
            )
        for name, least in _LEAST.items():
            most = MOST_THREADS if name.endswith("_threads") else MOST_BATCHES
            require_int(name, kwargs.get(name, 1), least=least, most=most)
        require_batches(loader)
        as_target("device", device)
        _require_sharding(kwargs.get("input_sharding"))
        self._loader, self._device = loader, device
        # Programs change these arguments between two iterations.
        self._parallel_loader_kwargs: dict[str, Any] = kwargs
        self._current: spmd_data.MpDeviceLoader | None = None

    def __iter__(self) -> "PerDeviceLoader":
        self.close()
        given = self._parallel_loader_kwargs
        sharding = given.get("input_sharding")
        _require_sharding(sharding)
        if isinstance(sharding, Mapping):  # torch_xla looks up the batch's keys alone
            sharding = spmd_data.OptionalKeys(sharding)
        has_state = hasattr(self._loader, "state_dict")
        self._current = spmd_data.MpDeviceLoader(
            self._loader,
            self._device,
            input_sharding=sharding,
            prefetch=0 if has_state else given.get("device_prefetch_size", _PREFETCH),
            transfer_threads=given.get("host_to_device_transfer_threads", 1),
            batches_per_execution=given.get("batches_per_execution", 1),
        )
        return PerDeviceLoader(iter(self._current), sharding)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Private names are never read from the loader: copy and pickle look up their protocols.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def close(self) -> None:
        """Ends the running iteration, if any."""
        if self._current is not None:
            self._current.close()
            self._current = None


def _require_sharding(sharding: Any) -> None:
    """Raises TypeError for what is neither None, a ShardingSpec, nor a dict of these."""
    specs = {"": sharding} if not isinstance(sharding, Mapping) else sharding
    for key, spec in specs.items():
        if spec is not None:
            name = "input_sharding" if specs is not sharding else f"input_sharding[{key!r}]"
            write = "ShardingSpec(mesh, partition_spec)"
            require_kind(name, spec, spmd.ShardingSpec, write=write)


class PerDeviceLoader(Iterator[Any]):
    """Iterator over the batches on the device, with torch_xla's exception types: see `next`."""

    def __init__(self, batches: Iterator[Any], input_sharding: Any = None) -> None:
        self._batches, self._sharding = batches, input_sharding

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except spmd_data.MissingShardingError as error:
            raise KeyError(
                f"Keys: {error.missing} are missing from input_sharding. {error}"
            ) from error
        except DataError as error:
            text = (
                "input batch should be a dict when input sharding is a dict. "
                if "must be a dict" in str(error)
                else ""
            )
            raise ValueError(f"{text}{error}") from error
        if isinstance(self._sharding, Mapping):
            for key, spec in self._sharding.items():
                xla_model._check_minibatch(batch.get(key), spec)
        else:
            xla_model._check_minibatch(batch, self._sharding)
        return structures.map_tensors(batch, xla_model._replicated)

    def next(self) -> Any:
        """Ends the step and returns the next batch.

        Raises:
            StopIteration: there is no further batch.
            KeyError: a dict batch has keys that the dict of shardings lacks.
            ValueError: the shardings are a dict, and the batch is not.
            RuntimeError: a sharding has `minibatch`, and the number of rows is not divisible by the
                number of devices of this host.
        """
        return next(self)


class ParallelLoader:
    """A loader for one iteration on the one logical device: see `per_device_loader`."""

    @checked(**_LEAST)
    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: list[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        require_kind("devices", devices, list, tuple, write="[torch_xla.device()]")
        if not devices:
            raise ValueError(
                "devices are those on which batches are used, at least one; got []. "
                "Write [torch_xla.device()]."
            )
        self._devices = [as_target("devices", device) for device in devices]
        self._loader = MpDeviceLoader(
            cpu_loader,
            self._devices[0],
            batches_per_execution=batches_per_execution,
            device_prefetch_size=device_prefetch_size,
            host_to_device_transfer_threads=host_to_device_transfer_threads,
            input_sharding=input_sharding,
        )

    def per_device_loader(self, device: torch.device | str) -> PerDeviceLoader:
        """Returns the iterator over the device's batches.

        Raises:
            TypeError: `device` is no device.
            RuntimeError: the loader was not created for a device of this type.
        """
        if as_device("device", device).type not in {known.type for known in self._devices}:
            raise RuntimeError(
                f"a loader serves the devices that it was made for, {self._devices}; got {device}. "
                "Pass one of them."
            )
        return iter(self._loader)

    def close(self) -> None:
        """Ends the iteration."""
        self._loader.close()


__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]
