"""Processes that have started nothing yet, and share the seconds that torch and jax take to import.

`fresh_server.py` forks them. What is told of imports themselves or of variables that Python and jax
read when they start (`PYTHONHASHSEED`, `JAX_*`) is for `subprocess`.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


@functools.cache
def _server() -> str:
    """The socket of a server, which is started once and ends when this process does."""
    path = os.path.join(tempfile.mkdtemp(prefix="fresh-"), "socket")
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fresh_server.py"), path],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    atexit.register(server.communicate)
    return path


class Process:
    """A started program.

    Attributes:
        pid: the process's number.

    Args:
        arguments: what follows `python`: perhaps `-W` and an action, then a file, `-m` and a module
            or `-c` and code, and their arguments.
        environment: of the process, whole.
        folder: where it runs; here by default.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        environment: Mapping[str, Any],
        *,
        folder: Path | None = None,
    ) -> None:
        jaxs = {n: v for n, v in environment.items() if n.startswith("JAX_")}
        assert jaxs.items() <= os.environ.items(), f"jax has read its variables: {jaxs}"
        self._files = tempfile.TemporaryDirectory(prefix="fresh-")
        self._out, self._errors = (Path(self._files.name, name) for name in ("out", "errors"))
        for path in (self._out, self._errors):
            path.touch()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        request = {
            "arguments": [*map(str, arguments)],
            "environment": {name: str(value) for name, value in environment.items()},
            "folder": str(folder or Path.cwd()),
            "out": str(self._out),
            "errors": str(self._errors),
        }
        self._socket.sendall(f"{json.dumps(request)}\n".encode())
        self._told = b""
        self._code: int | None = None
        self.pid = self._number()

    def wait(self, timeout_s: float = 300) -> int:
        """The exit code, or the signal that ended it as a negative number.

        Raises:
            TimeoutError: it runs on.
        """
        if self._code is None:
            self._socket.settimeout(timeout_s)
            self._code = self._number()
        return self._code

    def until(self, is_said: Callable[[str], bool], timeout_s: float = 300) -> str:
        """What it has written to stdout, when that is as awaited or the process has ended.

        Raises:
            TimeoutError: it runs on.
        """
        deadline = time.monotonic() + timeout_s
        while not is_said(said := self._out.read_text()):
            with suppress(TimeoutError):
                self.wait(0.02)
                return self._out.read_text()
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has written {said!r}")
        return said

    def end(self) -> tuple[str, str]:
        """Kills it if it runs. Returns what it wrote to stdout and stderr."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()
        self._socket.close()
        with self._files:
            return self._out.read_text(), self._errors.read_text()

    def _number(self) -> int:
        """What the server tells next."""
        while b"\n" not in self._told:
            got = self._socket.recv(64)
            assert got, "the server has ended"
            self._told += got
        line, _, self._told = self._told.partition(b"\n")
        return int(line)


def run(
    arguments: Sequence[Any],
    environment: Mapping[str, Any],
    *,
    folder: Path | None = None,
    timeout_s: float = 300,
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end. The arguments are those of `Process`."""
    process = Process(arguments, environment, folder=folder)
    try:
        code = process.wait(timeout_s)
    finally:
        out, errors = process.end()
    return subprocess.CompletedProcess([*arguments], code, out, errors)
