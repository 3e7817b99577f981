"""OpenAI's interface over a real socket: answers, streams, errors, clients that hang up."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spmd_core as spmd
from examples.llama_serving.app import MAX_BODY_BYTES, Served, make_app
from examples.llama_serving.connections import Limits
from examples.llama_serving.engine import Engine, EngineFailedError
from examples.llama_serving.measures import Measures
from examples.llama_serving.programs import Programs
from examples.llama_serving.server import Server, address, listening_socket
from examples.llama_serving.tests.test_interface import JSON, NAMES
from examples.llama_serving.tests.tiny import LENGTH, QUEUE, make_engine, wait_idle
from examples.llama_serving.text import PromptEncoder

TEXT = {"prompt": "the cat sat", "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the cat"}],
    "max_tokens": 8,
    "temperature": 0,
}


@dataclass
class Running:
    """A server in a thread."""

    url: str
    engine: Engine
    server: Server
    thread: threading.Thread
    measures: Measures
    tokenizer: Any

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, headers=headers)

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.engine._thread.is_alive()


def start(
    programs: Programs, tokenizer: Any, *, limits: Limits | None = None, **served: Any
) -> Running:
    measures = Measures()
    engine = make_engine(programs, tokenizer, measures=measures)
    engine.start()
    app = make_app(Served(engine, PromptEncoder(tokenizer), measures, "tiny", 320, **served))
    server = Server(app, engine, grace_s=30, limits=limits)
    listening = listening_socket("127.0.0.1", 0)
    url = address(listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    return Running(url, engine, server, thread, measures, tokenizer)


@pytest.fixture(scope="module")
def running(programs: Programs, tokenizer: Any) -> Iterator[Running]:
    server = start(programs, tokenizer)
    yield server
    server.end()


@pytest.fixture
def client(running: Running) -> Iterator[httpx2.Client]:
    with running.client() as client:
        yield client
    wait_idle(running.engine)


def streamed(client: httpx2.Client, path: str, asked: dict[str, Any]) -> list[Any]:
    """The decoded events of a stream; the last one is "[DONE]"."""
    with client.stream("POST", path, json=asked | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(one) for one in data[:-1]] + [data[-1]]


def text_of(events: list[Any], choice: int = 0) -> str:
    choices = [event["choices"][0] for event in events[:-1]]
    return "".join(
        c["text"] if "text" in c else c["delta"].get("content", "")
        for c in choices
        if c["index"] == choice
    )


def error_of(response: httpx2.Response) -> tuple[int, str]:
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["message"]


# --- Answers --------------------------------------------------------------------------------------


@pytest.mark.one_device
def test_a_completion_whole_and_streamed(
    client: httpx2.Client, expected: Callable[..., list[int]], tokenizer: Any
) -> None:
    answer = client.post("/v1/completions", json=TEXT).json()
    ids = tokenizer(TEXT["prompt"]).input_ids
    tokens = expected(ids, 12)
    text = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
    assert TEXT["prompt"] + answer["choices"][0]["text"] == text
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(tokens),
        "total_tokens": len(ids) + len(tokens),
    }
    events = streamed(client, "/v1/completions", TEXT)
    assert events[-1] == "[DONE]" and len({event["id"] for event in events[:-1]}) == 1
    assert text_of(events) == answer["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_a_chat_whole_and_streamed(client: httpx2.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT).json()
    message = answer["choices"][0]["message"]
    assert answer["object"] == "chat.completion" and message["role"] == "assistant"
    events = streamed(client, "/v1/chat/completions", CHAT)
    assert text_of(events) == message["content"] != ""
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    plain = {**TEXT, "prompt": "user: the cat\n\nassistant:", "max_tokens": 8}
    as_text = client.post("/v1/completions", json=plain).json()
    assert as_text["choices"][0]["text"] == message["content"]
    shorter = {**CHAT, "max_tokens": None, "max_completion_tokens": 2}
    assert (
        client.post("/v1/chat/completions", json=shorter).json()["usage"]["completion_tokens"] <= 2
    )


def test_a_stream_ends_in_the_numbers_of_tokens(client: httpx2.Client) -> None:
    """As clients ask for it; they append what an event repeats, so the role comes once."""
    asked = CHAT | {"n": 2, "stream_options": {"include_usage": True}}
    events = streamed(client, "/v1/chat/completions", asked)
    usage, pieces = events[-2], events[:-2]
    assert usage["choices"] == [] and all(event["usage"] is None for event in pieces)
    whole = client.post("/v1/chat/completions", json=CHAT | {"n": 2}).json()
    assert usage["usage"] == whole["usage"]
    choices = [event["choices"][0] for event in pieces]
    for i in range(2):
        deltas = [choice["delta"] for choice in choices if choice["index"] == i]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert deltas[-1] == {}
    events = streamed(client, "/v1/completions", TEXT | {"stream_options": None})
    assert all("usage" not in event for event in events[:-1])


def test_content_in_parts_is_its_lines(client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]
    asked = {"max_tokens": 8, "temperature": 0}
    answers = [
        client.post(
            "/v1/chat/completions",
            json=asked | {"messages": [{"role": "user", "content": content}]},
        ).json()
        for content in (parts, "the cat\nsat")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_several_prompts_and_choices(client: httpx2.Client, tokenizer: Any) -> None:
    asked: dict[str, Any] = {
        "prompt": ["the cat", "a dog"],
        "n": 2,
        "seed": 4,
        "max_tokens": 10,
        "top_p": 0.9,
    }
    choices = client.post("/v1/completions", json=asked).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in choices]
    assert len(set(texts)) == 4
    events = streamed(client, "/v1/completions", asked)
    assert [text_of(events, i) for i in range(4)] == texts
    ids = [tokenizer(text).input_ids for text in asked["prompt"]]
    again = client.post("/v1/completions", json=asked | {"prompt": ids}).json()["choices"]
    assert [choice["text"] for choice in again] == texts
    # A choice is the request with the next seed.
    alone = {**asked, "prompt": "the cat", "n": 1, "seed": 5}
    assert client.post("/v1/completions", json=alone).json()["choices"][0]["text"] == texts[1]
    unseeded = {"prompt": "the cat", "n": 4, "max_tokens": 10}
    choices = client.post("/v1/completions", json=unseeded).json()["choices"]
    assert len({choice["text"] for choice in choices}) > 1


def test_stop_strings_and_token_ids(client: httpx2.Client, tokenizer: Any) -> None:
    text = client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
    stop = text[3:5]
    answer = client.post("/v1/completions", json=TEXT | {"stop": stop}).json()["choices"][0]
    assert answer["text"] == text[: text.find(stop)] and answer["finish_reason"] == "stop"
    ids = TEXT | {"prompt": tokenizer(TEXT["prompt"]).input_ids}
    assert client.post("/v1/completions", json=ids).json()["choices"][0]["text"] == text


def test_tokens_are_as_many_as_fit_unless_said(client: httpx2.Client) -> None:
    asked: dict[str, Any] = {"prompt": [5] * 90, "temperature": 0}
    usage = client.post("/v1/completions", json=asked).json()["usage"]
    assert usage["completion_tokens"] <= LENGTH - 90
    chat = {"messages": CHAT["messages"], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=chat).json()
    by_length = answer["choices"][0]["finish_reason"] == "length"
    assert by_length == (answer["usage"]["total_tokens"] == LENGTH)


def test_models_health_figures_and_page(client: httpx2.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert abs(model.pop("created") - time.time()) < 3600
    expected = {"id": "tiny", "object": "model", "owned_by": "local", "max_model_len": LENGTH}
    assert model == expected
    assert client.get("/v1/models/tiny").json().items() > expected.items()
    status, message = error_of(client.get("/v1/models/org/other"))
    assert status == 404 and "this server has the model 'tiny'; got 'org/other'" in message
    assert client.head("/health").status_code == 200
    assert error_of(client.options("/v1/models"))[0] == 405
    assert client.get("/health").json() == {"status": "ok"}
    figures = client.get("/metrics")
    assert figures.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in figures.text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) llama_\w+ .+|llama_\w+(\{\w+="[^"]+"\})? \S+', line)
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text


# --- Many clients ---------------------------------------------------------------------------------


@pytest.mark.one_device
def test_64_clients_at_once(running: Running, client: httpx2.Client) -> None:
    """Each is answered, streamed or not, with its own text; some hang up in between."""
    client.post("/v1/completions", json=TEXT)
    compiles = spmd.metrics.counter("compiles")

    def ask(i: int) -> str:
        asked = {"prompt": f"the {i % 16} cats", "seed": i % 16, "max_tokens": 6 + i % 16}
        with running.client() as own:
            if i >= 48:  # hangs up
                with own.stream("POST", "/v1/completions", json=asked | {"stream": True}) as r:
                    next(r.iter_lines())
                return ""
            if i >= 32:
                return text_of(streamed(own, "/v1/completions", asked))
            return own.post("/v1/completions", json=asked).json()["choices"][0]["text"]

    with ThreadPoolExecutor(64) as threads:
        texts = list(threads.map(ask, range(64)))
    assert texts[:16] == texts[16:32] == texts[32:48] and len(set(texts[:16])) > 12
    assert spmd.metrics.counter("compiles") == compiles
    wait_idle(running.engine)
    assert not any(running.engine._slots)


def test_a_client_that_hangs_up_frees_its_slot(running: Running, client: httpx2.Client) -> None:
    before = running.measures.value("llama_requests_total", outcome="cancelled")
    release = threading.Event()
    decode = running.engine._programs.decode
    running.engine._programs.decode = lambda: (release.wait(60), decode())[1]  # type: ignore
    try:
        for stream in (False, True):
            body = json.dumps({"prompt": [5], "max_tokens": 90, "stream": stream}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost"
            head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            with socket.create_connection(("127.0.0.1", running.port)) as s:
                s.sendall(head.encode() + b"\r\n\r\n" + body)
                until(lambda: any(running.engine._slots))
            time.sleep(0.2)  # the server sees the end of the connection
            release.set()
            until(lambda: running.engine.is_idle)
            release.clear()
    finally:
        release.set()
        del running.engine._programs.decode
    after = running.measures.value("llama_requests_total", outcome="cancelled")
    assert (after or 0) - (before or 0) == 2


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({}, 400, "prompt is required; got a body without it. Add it."),
        ([], 400, "the body must be a JSON object; got []. Send for instance"),
        (
            {"prompt": 3},
            400,
            "prompt should be a text, token ids, or a list of 1 to 16 of them; got 3.",
        ),
        ({"prompt": [2, "a"]}, 400, "prompt.1 should be a token id, an integer; got 'a'. Change"),
        (TEXT | {"temperature": 3}, 400, "temperature should be less than or equal to 2; got 3."),
        (TEXT | {"temperature": "1"}, 400, "temperature should be a number; got '1'."),
        (TEXT | {"max_tokens": True}, 400, "max_tokens should be an integer; got True."),
        (TEXT | {"max_tokens": 0}, 400, "max_tokens should be greater than or equal to 1; got 0."),
        (TEXT | {"top_p": 0}, 400, "top_p should be greater than 0; got 0. Change it."),
        (TEXT | {"n": 17}, 400, "n should be less than or equal to 16; got 17. Change it."),
        (TEXT | {"seed": 2**63}, 400, "seed should be less than 9223372036854775808; got"),
        (TEXT | {"stop": 5}, 400, "stop should be a text, or a list of at most 16 texts; got 5."),
        (TEXT | {"stop": ["a", ""]}, 400, "stop.1 should not be empty; got ''. Change it."),
        (TEXT | {"tokens": 5}, 400, "tokens is no option of this interface. Leave it out."),
        (TEXT | {"logprobs": 0}, 400, "logprobs is not supported by this server; got 0. Leave it"),
        (TEXT | {"echo": True}, 400, "echo is not supported by this server; got True."),
        (TEXT | {"model": "gpt"}, 404, "this server has the model 'tiny'; got 'gpt'. Leave the"),
        (TEXT | {"prompt": ""}, 400, "prompt must have at least one token; got none. Write"),
        (TEXT | {"prompt": [2, 320]}, 400, "token ids must be from 0 to 319; got 320. Use the"),
        (TEXT | {"prompt": [10**900]}, 400, "from 0 to 319; got 1000000000000000000000000000000"),
        (TEXT | {"prompt": [2] * 96}, 400, "room for a token within 96 tokens; got 96 tokens."),
        (TEXT | {"prompt": [2] * 90}, 400, "at most 96 tokens; got 90 and 12. Pass at most 6, or"),
    ],
)
def test_a_refusal_says_what_to_do(
    asked: Any, status: int, message: str, client: httpx2.Client
) -> None:
    found, text = error_of(client.post("/v1/completions", json=asked))
    assert (found, message in text) == (status, True), text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages should have at least 1 item"),
        ([{"role": "tool", "content": "a"}], "messages.0.role should be 'system', 'developer', "),
        ([{"role": "user"}], "messages.0.content is required; got a body without it. Add it."),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0 should be {"),
    ],
)
def test_a_chat_is_refused(messages: Any, message: str, client: httpx2.Client) -> None:
    found, text = error_of(client.post("/v1/chat/completions", json={"messages": messages}))
    assert (found, message in text) == (400, True), text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_refusal_names_the_limit_that_was_sent(name: str, client: httpx2.Client) -> None:
    asked = {"messages": CHAT["messages"], name: 2**40}
    error = client.post("/v1/chat/completions", json=asked).json()["error"]
    assert error["param"] == name and f"prompt and {name} together must be at" in error["message"]


# What clients send beside what was set: openai-python's message of an earlier answer, the defaults
# of LangChain, LiteLLM, Continue and Open WebUI, nulls of clients that send every field.
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "functions": None,
    "logit_bias": {},
    "logprobs": None,
    "metadata": {"purpose": "test"},
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "response_format": {"type": "text"},
    "seed": None,
    "service_tier": "auto",
    "stop": None,
    "store": False,
    "stream": None,
    "stream_options": None,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1,
    "user": "me",
}


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), st.booleans())
def test_any_json_is_answered_or_refused(
    client: httpx2.Client, data: dict[str, Any], stream: bool
) -> None:
    short = {"max_tokens": 1, "n": 1, "stream": stream}
    for path, right in (("completions", TEXT), ("chat/completions", CHAT)):
        body = json.dumps(right | data | short).encode()
        response = posted(client, body, path=f"/v1/{path}")
        if response.status_code != 200:
            status, message = error_of(response)
            assert status in (400, 404) and message, (status, message)


def test_options_that_ask_for_nothing_are_taken(client: httpx2.Client) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    assert client.post("/v1/completions", json=asked | NEUTRAL).status_code == 200
    earlier: dict[str, Any] = {"role": "assistant", "content": "b", "refusal": None}
    earlier |= {"tool_calls": None, "annotations": [], "audio": None, "function_call": None}
    messages = [{"role": "user", "content": "a", "name": "me"}, earlier, CHAT["messages"][0]]
    chat = {"messages": messages, "max_completion_tokens": 1}
    assert client.post("/v1/chat/completions", json=chat | NEUTRAL).status_code == 200


def test_a_template_that_fails_refuses_the_messages(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, running: Running
) -> None:
    template = "{% for message in messages %}{{ message.role + 1 }}{% endfor %}"
    monkeypatch.setattr(running.tokenizer, "chat_template", template)
    status, message = error_of(client.post("/v1/chat/completions", json=CHAT))
    assert status == 400 and "as the model's chat template requires; got the roles user" in message


def posted(client: httpx2.Client, body: bytes, *, path: str = "/v1/completions") -> httpx2.Response:
    headers = {"Content-Type": "application/json"}
    return client.post(path, content=body, headers=headers)


def test_what_is_no_request(client: httpx2.Client) -> None:
    half = rb'{"prompt": "\ud800"}'
    nan = b'{"temperature": NaN}'
    long = b'{"prompt": [' + b"9" * 5000 + b"]}"
    for body in (b"{", b"\xff", b"[" * 100_000, b'{"prompt": "a",}', half, nan, long):
        status, message = error_of(posted(client, body))
        assert status == 400 and message.startswith("the body must be JSON; got something else")
        assert len(message) < 400 and "recursion" not in message
    error = posted(client, b'{"prompt": "a", "n": 1, "n": 2}').json()["error"]
    assert error["param"] == "n" and error["message"].startswith("an object has each name once; go")
    status, message = error_of(posted(client, b" " * (MAX_BODY_BYTES + 1)))
    assert status == 413 and f"at most {MAX_BODY_BYTES} bytes; got {MAX_BODY_BYTES + 1}" in message
    status, message = error_of(client.get("/v1/engines"))
    assert (status, message) == (
        404,
        "paths are those of OpenAI's interface; got /v1/engines. Try /v1/completions.",
    )
    response = client.get("/v1/completions")
    assert response.headers["allow"] == "POST"
    assert error_of(response) == (405, "/v1/completions takes POST; got GET. Change the method.")


def test_a_fault_is_said_as_json(
    running: Running, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, text: 1 / 0)
    status, message = error_of(client.post("/v1/completions", json=TEXT))
    assert status == 500
    assert message == "the server has a fault: ZeroDivisionError('division by zero'). Report it."


def test_more_texts_than_may_ever_wait(client: httpx2.Client) -> None:
    status, message = error_of(client.post("/v1/completions", json={"prompt": ["a"] * 16, "n": 16}))
    assert status == 400
    assert message.startswith(f"prompts times n must be at most {QUEUE}, the requests that may wa")


def test_a_full_queue_asks_to_come_again(running: Running, client: httpx2.Client) -> None:
    """And what was taken before is answered all the same."""
    release = threading.Event()
    decode = running.engine._programs.decode
    running.engine._programs.decode = lambda: (release.wait(60), decode())[1]  # type: ignore
    asked = {"prompt": ["a"] * 10, "n": 2, "max_tokens": 2}
    try:
        with ThreadPoolExecutor(16) as threads:
            taken = []
            # A turn takes 3 prompts, as they are padded to 32 of 96 tokens, and 97 wait.
            for number in range(1, 6):
                taken.append(threads.submit(client.post, "/v1/completions", json=asked))
                held = number * 20
                until(lambda held=held: in_engine(running) == held)  # type: ignore[misc]
            response = client.post("/v1/completions", json=asked)
            release.set()
            assert all(one.result().status_code == 200 for one in taken)
    finally:
        release.set()
        del running.engine._programs.decode
    status, message = error_of(response)
    assert status == 429 and f"at most {QUEUE} requests may wait; got 20 more while 97" in message
    assert response.headers["retry-after"] == "1"


def test_a_failed_engine_says_so(programs: Programs, tokenizer: Any) -> None:
    server = start(programs, tokenizer)
    release = threading.Event()

    class Broken:
        num_slots, length, sizes = programs.num_slots, programs.length, programs.sizes

        def prefill(self, *args: Any) -> Any:
            release.wait(60)
            raise RuntimeError("no memory")

    server.engine._programs = Broken()  # type: ignore
    try:
        with server.client() as client, ThreadPoolExecutor() as threads:
            whole = threads.submit(client.post, "/v1/completions", json=TEXT)
            stream = threads.submit(streamed_lines, client)
            until(lambda: in_engine(server) == 2)
            release.set()
            message = "a step on the device failed: no memory. Restart the server."
            assert error_of(whole.result()) == (500, message)
            (event,) = stream.result()
            assert json.loads(event)["error"]["message"] == message
            assert error_of(client.post("/v1/completions", json=TEXT)) == (500, message)
            health = client.get("/health")
            assert health.status_code == 503
            assert health.json() == {"status": "failed", "error": message}
        assert isinstance(server.engine.failure, EngineFailedError)
    finally:
        server.end()


def in_engine(running: Running) -> float:
    names = ("llama_queue_length", "llama_active_slots")
    return sum(running.measures.value(name) or 0 for name in names)


def streamed_lines(client: httpx2.Client) -> list[str]:
    with client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_a_shutdown_lets_requests_end(programs: Programs, tokenizer: Any) -> None:
    server = start(programs, tokenizer)
    asked = TEXT | {"prompt": [5], "max_tokens": 60}
    with server.client() as client, ThreadPoolExecutor() as threads:
        found = threads.submit(streamed, client, "/v1/completions", asked)
        until(lambda: bool(server.measures.value("llama_active_slots")))
        server.end()
        assert found.result()[-1] == "[DONE]"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url + "/health")
