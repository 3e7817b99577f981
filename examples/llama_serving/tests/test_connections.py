"""Clients that are silent, slow or speak no HTTP cost the others nothing, and fill no log."""

import contextlib
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.llama_serving.connections import Limits, possible_connections
from examples.llama_serving.programs import Programs
from examples.llama_serving.tests.test_app import TEXT, Running, in_engine, start, until
from examples.llama_serving.tests.tiny import wait_idle

LIMITS = Limits(connections=6, head_s=0.6, write_s=0.6)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def running(programs: Programs, tokenizer: Any) -> Iterator[Running]:
    server = start(programs, tokenizer, limits=LIMITS, body_s=0.5)
    yield server
    server.end()


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture, running: Running) -> Iterator[None]:
    """What clients do wrong is told to them, and to nobody else."""
    yield
    wait_idle(running.engine)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@contextlib.contextmanager
def connected(running: Running, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        client.sendall(sent)
        yield client


def answer_to(running: Running, sent: bytes) -> tuple[int, str]:
    """The status and the message of the one answer before the server closes."""
    with connected(running, sent) as client:
        data = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_silent_clients_starve_nobody(running: Running) -> None:
    """Each new connection takes the place of the one that was silent for the longest time."""
    with contextlib.ExitStack() as stack:
        for sent in (b"", HEAD, b"G") * 10:
            stack.enter_context(connected(running, sent))
        for _ in range(3):
            with running.client() as client:
                assert client.post("/v1/completions", json=TEXT).status_code == 200
        assert len(running.server.server_state.connections) <= LIMITS.connections + 1
    until(lambda: not running.server.server_state.connections)


def test_a_late_head_and_a_late_body(running: Running) -> None:
    status, message = answer_to(running, HEAD)
    assert (status, "must arrive within 0.6 s; got a part" in message) == (408, True)
    body = HEAD + b"Connection: close\r\nContent-Length: 20\r\n\r\n{"
    status, message = answer_to(running, body)
    assert (status, "within 0.5 s; got 1 bytes of it. Send it faster" in message) == (408, True)
    with connected(running, b"") as client:
        assert client.recv(1) == b""  # closed without a word
    slow = HEAD + b"Content-Length: 90000\r\n\r\n{"  # a byte now and then keeps no connection
    with connected(running, slow) as client:

        def trickle() -> None:
            for _ in range(200):
                client.sendall(b" ")
                time.sleep(0.05)

        with pytest.raises(OSError, match=r"reset|pipe"):
            trickle()


def test_all_are_busy(running: Running) -> None:
    release = threading.Event()
    decode = running.engine._programs.decode
    running.engine._programs.decode = lambda: (release.wait(60), decode())[1]  # type: ignore
    body = json.dumps({"prompt": [5], "max_tokens": 4}).encode()
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(LIMITS.connections):
                stack.enter_context(connected(running, request))
            until(lambda: in_engine(running) == LIMITS.connections)
            status, message = answer_to(running, b"")
            assert status == 503 and message.startswith("at most 6 requests may be open; got one m")
    finally:
        release.set()
        del running.engine._programs.decode
    until(lambda: not running.server.server_state.connections)
    assert httpx2.get(running.url + "/health").is_success


def test_a_client_that_reads_nothing(running: Running) -> None:
    """Its answers fill the buffers, and then its connection ends."""
    page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", running.port))
        with contextlib.suppress(OSError):
            for _ in range(2000):
                client.sendall(page)
        until(lambda: not running.server.server_state.connections)


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\nhello\r\n\r\n",
        b"GET / HTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http(sent: bytes, running: Running) -> None:
    status, message = answer_to(running, sent)
    assert status == 400 and message.startswith("requests must be HTTP/1.1, with at most 16 KiB")


def test_requests_behind_each_other(running: Running) -> None:
    body = json.dumps(TEXT | {"max_tokens": 2}).encode()
    request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(running, request * 3 + last) as client:
        data = b"".join(iter(lambda: client.recv(65536), b""))
    assert data.count(b"HTTP/1.1 200 OK") == 4 and data.endswith(b'{"status":"ok"}')


PARTS = st.lists(
    st.sampled_from(
        [
            *(HEAD, b"GET / HTTP/1.1\r\n", b"Host: localhost\r\n", b"Content-Length: 5\r\n"),
            *(b"Connection: close\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"5\r\n"),
            *(b'{"a":1}', b"0\r\n\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
            *(b"Expect: 100-continue\r\n", b"OPTIONS * HTTP/1.1\r\n", b"%ff%00", b"Host: [::\r\n"),
        ]
    )
    | st.binary(max_size=8),
    max_size=8,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(PARTS)
def test_any_bytes_get_no_internal_error(running: Running, parts: list[bytes]) -> None:
    with connected(running, b"".join(parts)) as client:
        client.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"HTTP/1.1 5" not in data and b"internal" not in data


def test_connections_fit_into_the_files_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(10**6, 10**6), (256, 256), (256, 10**6), (resource.RLIM_INFINITY, -1), (64, 100)]
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: set_to.append(new))
    found = []
    for limit in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: limit)
        found.append(possible_connections(1000))
    assert found[0] == found[2] == found[3] == 1000 and found[4] == 1 and 1 <= found[1] < 200
    assert [new[1] for new in set_to] == [256, 10**6, 100] and 1000 < set_to[1][0] < 3000
