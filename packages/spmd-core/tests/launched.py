"""Runs a program in several processes of this machine, which join each other at a free port."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fresh

_OWN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE")


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, and what it wrote to stderr."""

    code: int
    errors: str


def run(
    num_processes: int,
    arguments: Callable[[int, int], list[Any]],
    *,
    env: Callable[[int, int], dict[str, Any]] = lambda rank, port: {},
    timeout_s: float = 240,
) -> list[Ended]:
    """Starts the processes and waits for all; none outlives this.

    Args:
        num_processes: how many.
        arguments: of rank and port, what follows `python`.
        env: of rank and port, what is added to this process's environment.
        timeout_s: for all of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {name: value for name, value in os.environ.items() if name not in _OWN}
    common["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        fresh.Process(arguments(rank, port), common | env(rank, port))
        for rank in range(num_processes)
    ]
    codes = []
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        said = [process.end() for process in processes]
        if len(codes) < num_processes:
            print(*(errors for _, errors in said), sep="\n")  # pytest shows it
    return [Ended(code, errors) for code, (_, errors) in zip(codes, said)]


def as_torchrun(num_processes: int, rank: int, port: int) -> dict[str, Any]:
    """What torchrun tells each of its processes."""
    return {
        "WORLD_SIZE": num_processes,
        "RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def succeed(num_processes: int, arguments: Callable[[int, int], list[Any]], **options: Any) -> None:
    """As `run`; all processes must end with 0."""
    ended = run(num_processes, arguments, **options)
    assert not any(one.code for one in ended), "\n".join(one.errors for one in ended)
