"""The server's ASGI app: OpenAI's interface, health, figures and a page, over an engine."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from examples.llama_serving import engine as serving
from examples.llama_serving.engine import Engine, Event, Failed, Finished, Generation, Piece
from examples.llama_serving.guard import Access, Guard, page_policy
from examples.llama_serving.interface import (
    Answer,
    ChatRequest,
    CompletionRequest,
    RefusedError,
    decoded,
    error_body,
    parsed,
    shortened,
)
from examples.llama_serving.measures import CONTENT_TYPE, Measures
from examples.llama_serving.text import PromptEncoder, PromptError

MAX_BODY_BYTES = 1 << 20
MAX_DRAINED_BYTES = 64 << 20
RETRY_AFTER_S = 1
PAGE = Path(__file__).parent / "page.html"


@dataclass(frozen=True)
class Served:
    """What an app serves.

    Attributes:
        engine: started.
        encoder: of the model's tokenizer.
        measures: the engine's.
        name: of the model, to clients.
        vocab_size: of the model; the ids of a prompt are below it.
        access: who may ask.
        body_s: how long a request's body may take to arrive.
    """

    engine: Engine
    encoder: PromptEncoder
    measures: Measures
    name: str
    vocab_size: int
    access: Access = field(default_factory=Access)
    body_s: float = 30.0


def make_app(served: Served) -> ASGIApp:
    """The app; it starts and stops nothing."""
    endpoints = _Endpoints(served)
    app = Starlette(
        routes=[
            Route("/", endpoints.page, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/metrics", endpoints.metrics, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            # A name may have slashes.
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: _http_error,
            RefusedError: endpoints.refused,
            serving.EngineError: endpoints.engine_error,
            ClientDisconnect: _gone,
            Exception: _internal_error,
        },
    )
    return Guard(app, served.access)


class _Endpoints:
    """What answers each path."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._created_s = int(time.time())
        self._page = PAGE.read_text(encoding="utf-8")
        self._page_headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": page_policy(self._page),
        }

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def health(self, request: Request) -> Response:
        failure = self._served.engine.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "error": str(failure)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._served.measures.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "local",
            "max_model_len": self._served.engine.max_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            raise RefusedError(
                f"this server has the model {self._served.name!r}; got {name[:80]!r}. Leave the "
                "model out, or name this one.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = parsed(
            CompletionRequest, await _json_body(request, self._served.body_s)
        )
        prompts = [
            await run_in_threadpool(self._served.encoder.encode, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in asked.prompts
        ]
        return await self._answer(request, asked, prompts)

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = parsed(ChatRequest, await _json_body(request, self._served.body_s))
        messages = [message.for_template() for message in asked.messages]
        try:
            prompt = await run_in_threadpool(self._served.encoder.encode_chat, messages)
        except PromptError as error:
            raise RefusedError(str(error), param="messages") from None
        return await self._answer(request, asked, [prompt])

    async def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        self._served.measures.requests.labels("refused").inc()
        body = error_body(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
        return JSONResponse(body, status_code=error.status)

    async def engine_error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, serving.QueueFullError):
            self._served.measures.requests.labels("refused").inc()
            body = error_body(str(error), kind="rate_limit_error", code="queue_full")
            return JSONResponse(body, status_code=429, headers={"Retry-After": str(RETRY_AFTER_S)})
        is_stopping = isinstance(error, serving.EngineStoppedError)
        body = error_body(str(error), kind="server_error", code=_code(error))
        return JSONResponse(body, status_code=503 if is_stopping else 500)

    # --- A request's way through the engine -------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
    ) -> Response:
        self._check_model(asked.model)
        requests = [
            serving.Request(prompt, self._max_tokens(asked, prompt), asked.sampling(i), asked.stops)
            for prompt in prompts
            for i in range(asked.num_choices)
        ]
        if len(requests) > self._served.engine.max_queued:  # which no waiting would change
            raise RefusedError(
                f"prompts times n must be at most {self._served.engine.max_queued}, the requests "
                f"that may wait; got {len(requests)}. Send fewer at once.",
                param="n",
            )
        is_chat = isinstance(asked, ChatRequest)
        answer = Answer(is_chat=is_chat, model=self._served.name, with_usage=asked.with_usage)
        prompt_tokens = sum(map(len, prompts))
        run = _Run(self._served.engine, requests)
        if asked.stream:
            usage_of = prompt_tokens if asked.with_usage else None
            return _EventStream(run, answer, usage_of=usage_of)
        ended = asyncio.ensure_future(run.collected())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ClientDisconnect
            choices, completion_tokens = ended.result()
        finally:
            run.cancel()
            for task in (ended, gone):
                task.cancel()
            await asyncio.gather(ended, gone, return_exceptions=True)
        return JSONResponse(
            answer.whole(choices, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        )

    def _max_tokens(self, asked: CompletionRequest | ChatRequest, prompt: list[int]) -> int:
        """How many tokens continue a prompt, after checking that both fit."""
        longest, vocab_size = self._served.engine.max_length, self._served.vocab_size
        param = "messages" if isinstance(asked, ChatRequest) else "prompt"
        if not prompt:
            raise RefusedError(
                f"{param} must have at least one token; got none. Write something.", param=param
            )
        unknown = [token for token in prompt if not 0 <= token < vocab_size]
        if unknown:
            raise RefusedError(
                f"token ids must be from 0 to {vocab_size - 1}; got {shortened(unknown[0])}. Use "
                "the model's tokenizer, or send text.",
                param=param,
            )
        left = longest - len(prompt)
        if left < 1:
            raise RefusedError(
                f"a prompt must leave room for a token within {longest} tokens; got {len(prompt)} "
                "tokens. Shorten it.",
                param=param,
                code="context_length_exceeded",
            )
        name, max_tokens = asked.limit
        if max_tokens is None:
            return min(left, asked.default_max_tokens or left)
        if max_tokens > left:
            raise RefusedError(
                f"prompt and {name} together must be at most {longest} tokens; got "
                f"{len(prompt)} and {max_tokens}. Pass at most {left}, or shorten the prompt.",
                param=name,
                code="context_length_exceeded",
            )
        return max_tokens


class _Run:
    """The choices of one request, running; its events come to the event loop that made it.

    Raises:
        serving.EngineError: the engine takes no request.
    """

    def __init__(self, engine: Engine, requests: Sequence[serving.Request]) -> None:
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.num_choices = len(requests)
        self._generations: list[Generation] = engine.submit(
            [(request, self._listener(i)) for i, request in enumerate(requests)]
        )

    def _listener(self, choice: int) -> Any:
        def tell(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

        return tell

    def cancel(self) -> None:
        """Ends the choices that have not ended."""
        for generation in self._generations:
            generation.cancel()

    async def events(self) -> AsyncGenerator[tuple[int, Piece | Finished], None]:
        """Each choice's pieces and its end, as they come.

        Raises:
            serving.EngineError: a choice failed.
        """
        open_choices = self.num_choices
        while open_choices:
            choice, event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            open_choices -= isinstance(event, Finished)
            yield choice, event

    async def collected(self) -> tuple[list[tuple[str, str]], int]:
        """Each choice's text and why it ended, and the tokens of all."""
        texts, reasons, num_tokens = [""] * self.num_choices, [""] * self.num_choices, 0
        async for choice, event in self.events():
            if isinstance(event, Piece):
                texts[choice] += event.text
            else:
                reasons[choice] = event.reason.value
                num_tokens += event.num_tokens
        return list(zip(texts, reasons)), num_tokens


class _EventStream(StreamingResponse):
    """A request's server-sent events; a client that hangs up cancels the request.

    Args:
        run: what runs.
        answer: makes the events.
        usage_of: the tokens of the prompts, if the last event is to have the numbers of tokens.
    """

    def __init__(self, run: _Run, answer: Answer, *, usage_of: int | None) -> None:
        super().__init__(
            _events(run, answer, usage_of),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.cancel()


async def _events(run: _Run, answer: Answer, usage_of: int | None) -> AsyncIterator[str]:
    num_tokens = 0
    try:
        async with contextlib.aclosing(run.events()) as events:
            async for choice, event in events:
                if isinstance(event, Piece):
                    yield _sent_event(answer.piece(choice, event.text))
                else:
                    num_tokens += event.num_tokens
                    yield _sent_event(answer.piece(choice, "", event.reason.value))
        if usage_of is not None:
            usage = answer.usage(prompt_tokens=usage_of, completion_tokens=num_tokens)
            yield _sent_event(usage)
        yield "data: [DONE]\n\n"
    except serving.EngineError as error:  # the status is sent: the error is an event
        yield _sent_event(error_body(str(error), kind="server_error", code=_code(error)))


def _sent_event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _json_body(request: Request, within_s: float) -> Any:
    """The decoded body, which must arrive in time.

    Raises:
        RefusedError: it is not declared as JSON, too late, too large, or no JSON.
    """
    declared = request.headers.get("content-type", "")
    # A web page may send forms and text to any server without a preflight request, but not JSON.
    if declared.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(
            f"a body must have the Content-Type application/json; got {declared[:80]!r}. Add the "
            "header, as curl --json does.",
            code="unsupported_content_type",
        )
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= MAX_BODY_BYTES:
                    body += part
                # Most clients read an answer only when they have sent everything.
                elif num_bytes > MAX_DRAINED_BYTES:
                    break
    except TimeoutError:
        raise RefusedError(
            f"a body must arrive within {within_s:g} s; got {num_bytes} bytes of it. Send it "
            "faster, with the right Content-Length.",
            status=408,
            code="request_timeout",
        ) from None
    if num_bytes > MAX_BODY_BYTES:
        raise RefusedError(
            f"a body must have at most {MAX_BODY_BYTES} bytes; got {num_bytes} or more. Send less.",
            status=413,
        )
    return decoded(bytes(body))


async def _disconnected(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _code(error: Exception) -> str:
    if isinstance(error, serving.EngineStoppedError):
        return "shutting_down"
    return "engine_failed" if isinstance(error, serving.EngineFailedError) else "request_failed"


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:200], request.method
    if error.status_code == 404:
        message = f"paths are those of OpenAI's interface; got {path}. Try /v1/completions."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} takes {allowed}; got {method}. Change the method."
    else:
        message = error.detail
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    body = error_body(message, kind="invalid_request_error", code=code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """A fault of the server's own; Starlette logs it too."""
    message = f"the server has a fault: {error!r}. Report it."
    body = error_body(message, kind="server_error", code="internal_error")
    return JSONResponse(body, status_code=500)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads it; 499 is what servers log for a client that hung up."""
    return Response(status_code=499)
