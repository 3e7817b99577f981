"""The HTTP server: the app on a socket, until a signal or `stop`, then an orderly end."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from examples.llama_serving.connections import BACKLOG, LimitedConfig, Limits
from examples.llama_serving.engine import Engine

_EXTRA_S = 5.0  # for the last answers, after the engine's grace period


class Server(uvicorn.Server):
    """Serves an app; when it ends, requests in flight get a grace period, and the engine stops.

    Args:
        app: what answers.
        engine: what the app asks; started.
        grace_s: how long requests in flight may take after the signal.
        limits: of the connections.
    """

    def __init__(
        self, app: ASGIApp, engine: Engine, *, grace_s: float, limits: Limits | None = None
    ) -> None:
        config = LimitedConfig(
            app,
            limits=Limits() if limits is None else limits,
            log_level="error",  # clients get their errors as answers
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace_s + _EXTRA_S),
        )
        super().__init__(config)
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the engine and all connections. A second Ctrl-C ends the grace period."""
        stopping = asyncio.create_task(asyncio.to_thread(self._engine.stop, grace_s=self._grace_s))
        await super().shutdown(sockets)
        await asyncio.to_thread(self._engine.stop, grace_s=0)
        await stopping


class Ending:
    """Ctrl-C and SIGTERM from the first line on: none is lost, and none ends in a traceback.

    Before a server runs, they raise KeyboardInterrupt; then they end it.

    Attributes:
        was_interrupted: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.was_interrupted = False
        self._is_told = False
        self._server: Server | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, this handles both signals. A KeyboardInterrupt of its own ends the block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        except KeyboardInterrupt:
            if not self._is_told:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ends(self, server: Server) -> None:
        """From now on, signals end this server; uvicorn passes on those that it catches itself."""
        self._server = server

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        self.was_interrupted |= number == signal.SIGINT
        if self._server is None:
            raise KeyboardInterrupt
        self._server.should_exit = True


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; port 0 takes a free one.

    Raises:
        OSError: the address is not this machine's, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def address(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
