"""Runs a program in several processes of this machine, which join each other at a free port."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    env: Callable[[int, int], Mapping[str, Any]] = lambda rank, port: {},
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
    children = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments(rank, port))],
            env=common | {name: str(value) for name, value in env(rank, port).items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        errors = [child.communicate(timeout=timeout_s)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [Ended(child.returncode, said) for child, said in zip(children, errors)]


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
