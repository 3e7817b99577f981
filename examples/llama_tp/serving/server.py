"""The HTTP server: the app on a socket, until a signal or `stop`, then an orderly end."""

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

from examples.llama_tp.serving.engine import Engine

_EXTRA_S = 5.0  # for the last answers, after the engine's grace period


class Server(uvicorn.Server):
    """Serves an app; when it ends, requests in flight get a grace period, and the engine stops.

    Args:
        app: what answers.
        engine: what the app asks; started.
        grace_s: how long requests in flight may take after the signal.
    """

    def __init__(self, app: Starlette, engine: Engine, *, grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
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


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; port 0 takes a free one.

    Raises:
        OSError: the address is not this machine's, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def address(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
