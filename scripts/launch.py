"""Runs several processes of one program on this machine; each finds the others by the environment.

    scripts/launch.sh --processes 2 --devices-per-process 4 -- python -m examples.gpt2.train --smoke

Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), which `spmd_core.distributed.initialize()` reads. What it writes is shown with its
number before each line. If one fails, the others are ended, and its exit code is that of this
program; Ctrl-C ends all.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

# How long the others have to end by themselves when one has failed: they say why. Then how long
# they have after SIGTERM, which jax ignores, before SIGKILL.
GRACE_S, TERM_S = 10.0, 2.0
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        print("error: nothing to run; write the command after --.", file=sys.stderr)
        return EXIT_USAGE
    environments = [_environment(i, options) for i in range(options.processes)]
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell has what it runs in the background ignore this one.
    signal.signal(signal.SIGINT, _interrupt)
    try:
        for number, environment in enumerate(environments):
            try:
                child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    # Signals of the terminal come to this process alone.
                    start_new_session=True,
                )
            except OSError as error:
                print(f"error: {command[0]} cannot be run: {error}.", file=sys.stderr)
                _end(children, signal.SIGTERM)
                return EXIT_USAGE
            children.append(child)
            readers += _shown(child, number)
        return _watched(children)
    except KeyboardInterrupt:
        _end(children, signal.SIGINT)
        return EXIT_INTERRUPTED
    finally:
        _end(children, signal.SIGKILL)
        for reader in readers:
            reader.join(timeout=5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/launch.sh",
        usage="%(prog)s [--processes N] [--devices-per-process N] -- command ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes",
        type=_up_to(256),
        default=2,
        metavar="N",
        help="how many to run (default: 2)",
    )
    parser.add_argument(
        "--devices-per-process",
        type=_up_to(2048),
        metavar="N",
        help="emulated CPU devices of each process; without it, each has what the machine gives",
    )
    parser.add_argument(
        "--port", type=_port, help="the port where process 0 listens (default: a free one)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    return parser


def _up_to(most: int) -> Callable[[str], int]:
    """A whole number from 1 to `most`, as a `type` of `ArgumentParser.add_argument`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"this is a whole number from 1 to {most}; got {text!r}. Write for instance 2"
            )
        return int(text)

    return read


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(
            f"this is a port from 1 to 65535; got {text!r}. Leave it out for a free one"
        )
    return int(text)


def _environment(number: int, options: argparse.Namespace) -> dict[str, str]:
    if options.port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options.port = free.getsockname()[1]
    added = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(options.port),
        "WORLD_SIZE": str(options.processes),
        "LOCAL_WORLD_SIZE": str(options.processes),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "PYTHONUNBUFFERED": "1",
    }
    if options.devices_per_process is not None:
        added |= {
            "PJRT_DEVICE": "CPU",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(options.devices_per_process),
        }
    return {**os.environ, **added}


def _shown(child: "subprocess.Popen[str]", number: int) -> list[threading.Thread]:
    """Threads that show what a process writes, until it closes its output."""

    def show(source: IO[str], target: IO[str]) -> None:
        for line in source:
            # In one call, so that lines of different processes stay apart.
            target.write(f"[{number}] {line if line.endswith(chr(10)) else line + chr(10)}")
            target.flush()

    threads = [
        threading.Thread(target=show, args=streams, daemon=True)
        for streams in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    ]
    for thread in threads:
        thread.start()
    return threads


def _watched(children: "list[subprocess.Popen[str]]") -> int:
    """Waits for all processes; after the first failure, only for a while. Returns its exit code."""
    while True:
        codes = [child.poll() for child in children]
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
    code = codes[failed[0]] or 0
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    print(f"launch: process {failed[0]} ended with {how}; ending the others", file=sys.stderr)
    deadline = time.monotonic() + GRACE_S
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    _end(children, signal.SIGTERM)
    return code if code > 0 else 128 - code


def _end(children: "list[subprocess.Popen[str]]", how: signal.Signals) -> None:
    """Sends a signal to the processes and what they have started; soon after, SIGKILL."""
    for number in (how, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        for child in running:
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + (GRACE_S if number is signal.SIGINT else TERM_S)
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.02)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
