"""Registers torch_xla's names with torch.distributed: the backend "xla" and `init_method="xla://"`.

The init method connects the SPMD processes. The backend exchanges tensors over the host, by gloo;
inside a program the partitioner moves data between devices.
"""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from spmd_core.runtime import processes

_DEFAULT_PORT = 12355


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    rank, size = processes.process_index(), processes.process_count()
    port = urlparse(url).port
    if size == 1:
        # No other process connects, so any free port will do.
        host, port = "127.0.0.1", port or 0
    else:
        host = processes.get_master_ip()
        text = os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))
        if not text.isdecimal() or not 0 < int(text) < 2**16:
            raise ValueError(
                f"MASTER_PORT is a port, from 1 to 65535; got {text!r}. Correct it or unset it."
            )
        port = port or int(text)
    yield dist.TCPStore(host, port, size, rank == 0, timeout, multi_tenant=True), rank, size


def _backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.register_rendezvous_handler("xla", _rendezvous)
dist.Backend.register_backend("xla", _backend, devices=["cpu", "xla"])
