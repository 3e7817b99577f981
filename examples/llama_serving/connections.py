"""Limits the number of HTTP connections, and the time that a client may be silent.

uvicorn has no limit of the time for a request's head, and refuses new connections where others only
hold theirs open.
"""

import asyncio
import json
import os
import resource
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from examples.llama_serving.guard import NO_CONTENT_POLICY
from examples.llama_serving.interface import error_body

BACKLOG = 64  # connections that are accepted at once, at most
_OTHER_FILES = 32  # files that the server may open beside connections


@dataclass(frozen=True)
class Limits:
    """Of a server's connections.

    Attributes:
        connections: at the same time. A new one beyond takes the place of one that has no request;
            where all have one, it is answered 503.
        head_s: how long a request's line and headers may take.
        write_s: how long a client may read nothing of what waits for it.
    """

    connections: int = 1024
    head_s: float = 10.0
    write_s: float = 60.0


class LimitedConfig(uvicorn.Config):
    """uvicorn's configuration with limits of connections.

    Args:
        app: what answers.
        limits: of the connections.
        options: of `uvicorn.Config`.
    """

    def __init__(self, app: Any, *, limits: Limits, **options: Any) -> None:
        self.limits = limits
        super().__init__(app, http=LimitedProtocol, ws="none", backlog=BACKLOG, **options)


class LimitedProtocol(H11Protocol):
    """A connection that is closed when its client is silent for too long."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self.config, LimitedConfig)
        self.limits = self.config.limits
        self.silent_since_s: float = self.loop.time()  # since when it has no request
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request is answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes an idle connection if there are too many; if none is idle, refuses this one."""
        super().connection_made(transport)
        is_full = len(self.connections) > self.limits.connections
        if is_full and not self._has_made_room():
            self._refuse(
                503,
                f"at most {self.limits.connections} requests may be open; got one more. Try again "
                "later.",
                code="too_many_connections",
            )
            return
        self._watch()

    def _has_made_room(self) -> bool:
        """Whether a place was free, or one without a request left, the longest silent first."""
        others = [
            other
            for other in self.connections
            if isinstance(other, LimitedProtocol)
            and other is not self
            and not other.transport.is_closing()
        ]
        if len(others) < self.limits.connections:
            return True
        silent = [other for other in others if not other.is_busy]
        if not silent:
            return False
        min(silent, key=lambda other: other.silent_since_s).transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        """A part of a request: its head has a time to be complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer was sent; uvicorn closes what then stays silent."""
        self.silent_since_s = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads slower than it is answered."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _watch(self) -> None:
        """Starts the time of a request's head, or ends it if the request is there."""
        if self._head_timer is not None and (self.is_busy or self.transport.is_closing()):
            self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None and not (self.is_busy or self.transport.is_closing()):
            self._head_timer = self.loop.call_later(self.limits.head_s, self._too_late)

    def _too_late(self) -> None:
        self._head_timer = None
        if self.is_busy or self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(
                408,
                f"a request's line and headers must arrive within {self.limits.head_s:g} s; got a "
                "part of them. Send them faster.",
                code="request_timeout",
            )
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and closes; a request that is being answered ends."""
        message = "requests must be HTTP/1.1, with at most 16 KiB of headers; got something else. "
        self._refuse(400, f"{message}Mend the client.", code="invalid_http")

    def _refuse(self, status: int, message: str, *, code: str) -> None:
        if self.cycle is not None:  # the app that answers it can send nothing any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(message, kind="invalid_request_error", code=code)).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                ("X-Content-Type-Options", "nosniff"),
                ("Content-Security-Policy", NO_CONTENT_POLICY),
            ]
            reason = STATUS_PHRASES[status]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def possible_connections(wanted: int) -> int:
    """How many connections this process can have, at most `wanted`.

    Raises the process's limit of open files where it may. At the limit, asyncio would write a
    traceback for each connection that it cannot accept, again and again.
    """
    others = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 256
    others += BACKLOG + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + others:
        soft = wanted + others
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - others))
