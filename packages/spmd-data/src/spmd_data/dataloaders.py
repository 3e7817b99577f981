"""`sharded_dataloader`: a torch `DataLoader` of this process's part, with safely forked workers."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

import spmd_core as spmd
from spmd_core.arguments import checked, require_callable, require_int
from spmd_core.errors import DataError
from spmd_data.sampler import ShardedSampler, Tail, require_samples

_MOST_WORKERS = 1024  # processes of this host


@checked(batch_size=1, num_workers=0)
def sharded_dataloader(
    dataset: Any,
    mesh: spmd.Mesh | None,
    axis: str | int | Sequence[str | int] | None,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail | str = Tail.DROP,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """A DataLoader whose batches are this process's part of global batches. Starts the devices.

    Its sampler is a `ShardedSampler`, so `MpDeviceLoader` knows its position, from which a run
    continues with any number of processes and workers. Give the `MpDeviceLoader` a
    `ShardingSpec(..., minibatch=True)`: then the parts are one global batch.

    Worker processes are forked from a server process that has imported this package, and not from
    this process, because a fork is unsafe beside threads (jax's, above all). They live as long as
    the DataLoader, and end with this process, even if it is killed. The dataset and `collate_fn`
    are sent to them as pickles; a script needs `if __name__ == "__main__":`.

    Args:
        dataset: has a length, and samples by index.
        mesh: the mesh of the program; None for one process that loads everything.
        axis: the axis or axes of `mesh` that split the batch, as in a partition spec.
        batch_size: samples of a global batch, over all processes.
        seed, shuffle, tail: see `ShardedSampler`.
        num_workers: worker processes; 0: this process reads.
        collate_fn: makes a batch of a list of samples; None: torch's.

    Raises:
        TypeError: `dataset`, `mesh` or `collate_fn` is of another kind.
        DataError: see `ShardedSampler.of_mesh`.
    """
    require_samples(dataset)
    if collate_fn is not None:
        require_callable("collate_fn", collate_fn)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "tail": tail,
    }
    if mesh is None:
        if axis is not None:
            raise DataError(
                f"an axis that splits the batch is a mesh's; got axis={axis!r} and no mesh. Pass "
                "the mesh, or axis=None."
            )
        sampler = ShardedSampler(dataset, **options)
    else:
        sampler = ShardedSampler.of_mesh(dataset, mesh, axis, **options)
    context = None
    if require_int("num_workers", num_workers, least=0, most=_MOST_WORKERS):
        context = multiprocessing.get_context("forkserver")
        # Imported once in the server, instead of in each worker. (Not the main module, which Python
        # runs again in each worker; it warns if that is imported already.) Has an effect only
        # before the server starts.
        made_by = getattr(collate_fn, "func", collate_fn)  # the function of a partial
        modules = {type(dataset).__module__, getattr(made_by, "__module__", "spmd_data")}
        context.set_forkserver_preload(["spmd_data", *sorted(modules - {"__main__"})])
    return DataLoader(
        dataset,
        batch_size=sampler.local_batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        multiprocessing_context=context,
        persistent_workers=num_workers > 0,
        worker_init_fn=_end_with_parent if num_workers else None,
    )


def _end_with_parent(worker: int) -> None:
    """In a worker process: ends it when the process that wants its batches is gone.

    torch's own watchdog checks whether the parent has changed, but here the parent is the server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="spmd-data-parent", daemon=True).start()
