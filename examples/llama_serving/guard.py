"""Who may ask: the names of the server, origins of web pages, an API key, headers for browsers."""

import base64
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from examples.llama_serving.interface import RefusedError, error_body

OPEN_PATHS = ("/", "/health")  # which need no key: the page has a field for it
# For all answers but the page, which has its own policy.
NO_CONTENT_POLICY = "default-src 'none'; frame-ancestors 'none'"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Access:
    """Who may ask a server.

    Attributes:
        hosts: names by which clients may call it, beside `localhost` and addresses. A page of
            another site can have its own name lead to this machine, but no address.
        origins: web pages of other sites that may ask, as in `https://chat.example`; "*": all.
        api_key: what clients send as `Authorization: Bearer KEY`; None: nothing.
    """

    hosts: Collection[str] = ()
    origins: Sequence[str] = ()
    api_key: str | None = None


class Guard:
    """Refuses requests that may not ask, before the app sees them. An ASGI app around another.

    Args:
        app: what answers the others.
        access: who may ask.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._access = access
        self._hosts = {"localhost", *(host.lower() for host in access.hosts)}
        self._key = None if access.api_key is None else access.api_key.encode()
        self._app = app
        # A browser asks about another origin's request before it sends it, without the key.
        self._with_origins = CORSMiddleware(
            self._behind_key,
            allow_origins=access.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.update(_HEADERS)
                answer.setdefault("Content-Security-Policy", NO_CONTENT_POLICY)
            await send(message)

        try:
            self._check_host(headers.get("host", ""))
            self._check_origin(headers.get("origin"), headers.get("host", ""))
        except RefusedError as error:
            await _refusal(error)(scope, receive, send_guarded)
        else:
            await self._with_origins(scope, receive, send_guarded)

    def _check_host(self, host: str) -> None:
        found = _HOST.fullmatch(host)
        name = found.group(1).lower().rstrip(".") if found else ""
        if name in self._hosts or _is_address(name):
            return
        raise RefusedError(
            f"this server is called by its address, or as {', '.join(sorted(self._hosts))}; got "
            f"the host {host[:80]!r}. Use one of these, or start the server with --allow-host.",
            status=403,
            code="host_not_allowed",
        )

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or {"*", origin} & {*self._access.origins}:
            return
        if origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower()):
            return
        raise RefusedError(
            f"pages of other sites may not ask this server; got the origin {origin[:80]!r}. "
            "Start the server with --allow-origin for it.",
            status=403,
            code="origin_not_allowed",
        )

    async def _behind_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self._key)
            if scheme.lower() != "bearer" or not is_right:
                got = "another one" if given else "none"
                error = RefusedError(
                    "requests to this server must have its API key, as in 'Authorization: Bearer "
                    f"KEY'; got {got}. Send the key that the server was started with.",
                    status=401,
                    code="invalid_api_key",
                )
                await _refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(error: RefusedError) -> JSONResponse:
    body = error_body(str(error), kind="invalid_request_error", code=error.code)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(body, status_code=error.status, headers=headers)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine can connect to a socket."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


def page_policy(page: str) -> str:
    """The content security policy of a page: its own scripts and styles, and this server's data.

    They are named by their hashes, so what is put into the page does not run.
    """
    scripts, styles = (
        " ".join(f"'sha256-{_sha256(part)}'" for part in re.findall(pattern, page, re.DOTALL))
        for pattern in (r"<script>(.*?)</script>", r"<style>(.*?)</style>")
    )
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
