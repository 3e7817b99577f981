"""Imports torch and jax once, and forks for each program that `fresh.py` asks for.

`python fresh_server.py SOCKET` prints a line when it listens, and ends with its standard input. A
fork takes its folder, environment, output and arguments from the request, and runs the program as
`python` does: this process has started no thread and no backend, and imports nothing of this
project.
"""

import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
import warnings
from typing import Any

# What the programs import; here, before any of them sets its environment.
import jax  # noqa: F401
import torch  # noqa: F401


def serve(path: str) -> dict[str, Any]:
    """Forks for each request. Returns in the fork, with the request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those below
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in readable:
                shutil.rmtree(os.path.dirname(path))
                os._exit(0)
            connection, _ = listener.accept()
            with connection:
                if os.fork():
                    continue
                listener.close()
                request: dict[str, Any] = json.loads(connection.makefile().readline())
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                child = os.fork()
                if child:
                    _tell(connection, child)
            return request


def _tell(connection: socket.socket, child: int) -> None:
    """Sends the process's number, and its exit code when it has ended."""
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Runs what the request names, as `python` does."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is that of this process's environment
    for number, path in enumerate((os.devnull, request["out"], request["errors"])):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.orig_argv = [sys.executable, *request["arguments"]]
    first, *rest = request["arguments"]
    while first == "-W":
        action, first, *rest = rest
        warnings.simplefilter(action)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = sys.path[1:]  # behind the folder of this file
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-m":
        module, *rest = rest
        sys.argv = ["-m", *rest]  # runpy puts the module's path in the place of -m
        sys.path[:] = [os.getcwd(), *filter(None, paths), *own]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        code, *rest = rest
        sys.argv, name = ["-c", *rest], "<string>"
    else:
        with open(first) as file:
            code = file.read()
        sys.argv = [first, *rest]
        main.__file__ = name = first
    sys.path[:] = [os.path.dirname(os.path.abspath(name)) if first != "-c" else ""]
    sys.path += [*filter(None, paths), *own]
    exec(compile(code, name, "exec"), main.__dict__)


if __name__ == "__main__":
    become(serve(sys.argv[1]))
