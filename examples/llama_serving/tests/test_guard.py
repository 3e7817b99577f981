"""Who may ask the server: its names, other sites' pages, the key, and what browsers are told."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from examples.llama_serving.app import PAGE
from examples.llama_serving.guard import Access, is_local
from examples.llama_serving.programs import Programs
from examples.llama_serving.server import listening_socket
from examples.llama_serving.tests.test_app import TEXT, Running, error_of, start

KEY, SITE = "a-secret-key", "https://chat.example"


@pytest.fixture(scope="module")
def running(programs: Programs, tokenizer: Any) -> Iterator[Running]:
    access = Access(hosts=["llama.internal"], origins=[SITE], api_key=KEY)
    server = start(programs, tokenizer, access=access)
    yield server
    server.end()


def test_a_foreign_host_is_refused(running: Running) -> None:
    """Its page's name may lead to this machine: what it asks would be of its own origin."""
    with running.client(Authorization=f"Bearer {KEY}") as client:
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "a b", "[::"):
            response = client.get("/v1/models", headers={"Host": host})
            if response.headers["content-type"] == "application/json":
                status, message = error_of(response)
                assert status in (400, 403), (host, message)
        status, message = error_of(client.get("/health", headers={"Host": "evil.example"}))
        assert status == 403
        assert "is called by its address, or as llama.internal, localhost; got the h" in message
        assert "--allow-host" in message
        names = ("llama.internal", "LLAMA.internal:8000", "localhost:1", "127.0.0.1", "[::1]:80")
        for host in (*names, "192.0.2.7:8000"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_are_refused(running: Running) -> None:
    with running.client(Authorization=f"Bearer {KEY}") as client:
        for origin in ("https://evil.example", "null", running.url + "0"):
            for method in ("GET", "POST", "OPTIONS"):
                headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
                response = client.request(method, "/v1/completions", json=TEXT, headers=headers)
                status, message = error_of(response)
                assert status == 403 and "--allow-origin" in message
                assert "access-control-allow-origin" not in response.headers
        assert client.get("/v1/models", headers={"Origin": running.url}).status_code == 200
        response = client.get("/v1/models", headers={"Origin": SITE})
        assert response.headers["access-control-allow-origin"] == SITE
    asked = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"
    allowed = httpx2.options(running.url + "/v1/completions", headers=asked)  # without the key
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == SITE
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]


def test_forms_and_texts_are_refused(running: Running) -> None:
    """Browsers send these to other origins without asking before."""
    with running.client(Authorization=f"Bearer {KEY}") as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            content = b'{"prompt": "a"}'
            headers = {"Content-Type": kind}
            response = client.post("/v1/completions", content=content, headers=headers)
            status, message = error_of(response)
            assert status == 400 and f"application/json; got {kind!r}. Add" in message
        headers = {"Content-Type": "application/json; charset=utf-8"}
        content = b'{"prompt": "a", "max_tokens": 1}'
        assert client.post("/v1/completions", content=content, headers=headers).is_success


def test_requests_need_the_key(running: Running) -> None:
    wrong = ("", "Bearer", "Bearer x", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \xff")
    with running.client() as client:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/v1/unknown"):
            for header in wrong:
                given = {b"Authorization": header.encode("latin-1")}
                response = client.get(path, headers=given)
                status, message = error_of(response)
                assert status == 401 and "must have its API key" in message
                assert KEY not in message and response.headers["www-authenticate"] == "Bearer"
        assert error_of(client.post("/v1/completions", json=TEXT))[0] == 401
        assert client.get("/health").is_success and client.get("/").is_success
        right = {"Authorization": f"bearer {KEY}"}
        assert client.get("/v1/models", headers=right).is_success


def test_answers_tell_browsers_to_trust_nothing_else(running: Running) -> None:
    with running.client() as client:
        for path in ("/", "/health", "/v1/models", "/none"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "server" not in headers
        policy = client.get("/").headers["content-security-policy"]
    assert re.search(r"script-src 'sha256-[\w+/]{43}='; style-src 'sha256-[\w+/]{43}=';", policy)
    # Its own parts are named by their hash, so none may be an attribute.
    page = PAGE.read_text()
    assert not re.search(r"<[^>]* (style|on\w+)=", page) and page.count("<script>") == 1


def test_what_is_local() -> None:
    with listening_socket("127.0.0.1", 0) as near, listening_socket("0.0.0.0", 0) as far:
        assert is_local(near) and not is_local(far)
