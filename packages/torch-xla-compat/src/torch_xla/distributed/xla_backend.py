"""Registers `init_method="xla://"` with torch.distributed.

With it a CPU process group (gloo) of the SPMD processes finds its peers.
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
    host = "127.0.0.1" if size == 1 else processes.get_master_ip()
    port = urlparse(url).port or int(os.environ.get("MASTER_PORT", _DEFAULT_PORT))
    yield dist.TCPStore(host, port, size, rank == 0, timeout, multi_tenant=True), rank, size


dist.register_rendezvous_handler("xla", _rendezvous)
