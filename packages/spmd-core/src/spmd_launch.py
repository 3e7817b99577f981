r"""Runs several processes of one program on this machine; each finds the others by the environment.

    spmd-launch --processes 2 --devices-per-process 4 -- python -m examples.gpt2.train --smoke
    spmd-launch --processes 4,2 --restarts 3 -- \
        python -m examples.gpt2.train --smoke --mesh 'fsdp=*' --checkpoint runs/a --save-every 5

Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), which `spmd_core.distributed.initialize()` reads. What it writes is shown with its
number before each line. If one fails, the others are ended, and its exit code is that of this
program; with --restarts, all are started again, to go on from what they have saved. Not after exit
code 2, by which recipes refuse what they were given, nor after 130, of Ctrl-C.

Ctrl-C ends all. SIGTERM is passed on: recipes save and end with code 75, and so does this program.
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

PROG = "spmd-launch"
# How long the others have to end by themselves when one has failed: they say why. Then how long
# they have after SIGTERM, which jax ignores, before SIGKILL.
GRACE_S, TERM_S = 10.0, 2.0
EXIT_USAGE, EXIT_PREEMPTED, EXIT_INTERRUPTED = 2, os.EX_TEMPFAIL, 130


class _PreemptedError(Exception):
    """This program got SIGTERM."""


def main(arguments: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Runs the command line, of a program that help calls `prog`; returns the exit code."""
    options = _parser(prog).parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        print("error: nothing to run; write the command after --.", file=sys.stderr)
        return EXIT_USAGE
    signal.signal(signal.SIGTERM, _preempt)
    # A shell has what it runs in the background ignore this one.
    signal.signal(signal.SIGINT, _interrupt)
    for start in range(options.restarts + 1):
        number = options.processes[min(start, len(options.processes) - 1)]
        code, is_final = _run(command, number, options)
        if is_final or start == options.restarts:
            break
        following = options.processes[min(start + 1, len(options.processes) - 1)]
        print(
            f"launch: starting {following} process{'es' if following > 1 else ''} again, "
            f"{start + 1} of {options.restarts} restarts",
            file=sys.stderr,
            flush=True,
        )
    return code


def _run(command: list[str], number: int, options: argparse.Namespace) -> tuple[int, bool]:
    """Runs the processes once.

    Returns:
        The exit code, and whether starting them again is of no use or not wanted.
    """
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for environment in _environments(number, options):
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
                return EXIT_USAGE, True
            readers += _shown(child, len(children))
            children.append(child)
        code = _watched(children)
        return code, code in (0, EXIT_USAGE, EXIT_INTERRUPTED)
    except _PreemptedError:
        _end(children, signal.SIGTERM, wait_s=options.deadline)
        codes = [child.poll() for child in children]
        is_saved = all(code in (0, EXIT_PREEMPTED) for code in codes)
        return EXIT_PREEMPTED if is_saved else 128 + signal.SIGTERM, True
    except KeyboardInterrupt:
        _end(children, signal.SIGINT, wait_s=GRACE_S)
        return EXIT_INTERRUPTED, True
    finally:
        _end(children, signal.SIGKILL)
        for reader in readers:
            reader.join(timeout=5)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--processes N] [--devices-per-process N] [--restarts N] -- command ...",
        description=(__doc__ or "").replace(PROG, prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes",
        type=_numbers,
        default=(2,),
        metavar="N[,N...]",
        help="how many to run (default: 2); after commas, how many after each restart: 4,2 begins "
        "with 4 and goes on with 2",
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
    parser.add_argument(
        "--restarts",
        type=_up_to(10_000, least=0),
        default=0,
        metavar="N",
        help="how often all are started again when one has failed (default: 0)",
    )
    parser.add_argument(
        "--deadline",
        type=_up_to(10_000),
        default=40,
        metavar="SECONDS",
        help="how long the processes have after SIGTERM, before SIGKILL (default: 40; that of the "
        "recipes is 30)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    return parser


def _up_to(most: int, *, least: int = 1) -> Callable[[str], int]:
    """A whole number in a range, as a `type` of `ArgumentParser.add_argument`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"this is a whole number from {least} to {most}; got {text!r}. Write for instance 2"
            )
        return int(text)

    return read


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of processes, between commas."""
    return tuple(map(_up_to(256), text.split(",")))


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(
            f"this is a port from 1 to 65535; got {text!r}. Leave it out for a free one"
        )
    return int(text)


def _environments(number: int, options: argparse.Namespace) -> list[dict[str, str]]:
    """The environment of each process. Their port is another one at each start."""
    port = options.port
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "PYTHONUNBUFFERED": "1",
    }
    if options.devices_per_process is not None:
        common |= {
            "PJRT_DEVICE": "CPU",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(options.devices_per_process),
        }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


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


def _end(
    children: "list[subprocess.Popen[str]]", how: signal.Signals, *, wait_s: float = TERM_S
) -> None:
    """Sends a signal to the processes and what they have started; after `wait_s`, SIGKILL."""
    for number in (how, signal.SIGKILL):
        running = [child for child in children if child.poll() is None]
        for child in running:
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + (wait_s if number is how else TERM_S)
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.02)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _preempt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers say it twice
    raise _PreemptedError
