"""Requests join and leave at any step; each is answered once, whatever happens to the others."""

import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import spmd_core as spmd
from examples.llama_serving.batching import PromptSizes
from examples.llama_serving.engine import (
    Engine,
    EngineFailedError,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    Piece,
    QueueFullError,
    Request,
    RequestFailedError,
)
from examples.llama_serving.measures import OUTCOMES, Measures
from examples.llama_serving.programs import Prompt
from examples.llama_serving.sampling import NOT_FINITE, SamplingOptions
from examples.llama_serving.tests.tiny import (
    END,
    LENGTH,
    QUEUE,
    SLOTS,
    Client,
    ask,
    make_engine,
    wait_idle,
)

Generate = Callable[[Sequence[int], int], list[int]]


NO_NUMBER = 300  # a prompt's last token, after which logits are not finite


class CountingPrograms:
    """In place of the device: a slot's tokens count up from its prompt's last one. Never waits.

    Attributes:
        calls: what was sent, in order.
        gate: nothing is sent while it is cleared.
        fails: raised by the next call.
    """

    num_slots, length = SLOTS, LENGTH
    sizes = PromptSizes(num_slots=SLOTS, length=LENGTH)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self._last = [0] * SLOTS

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        self._send("prompt " + " ".join(str(prompt.slot) for prompt in prompts))
        for prompt in prompts:
            last = prompt.ids[-1]
            self._last[prompt.slot] = NOT_FINITE if last == NO_NUMBER else last + 1
        return torch.tensor([self._last[prompt.slot] for prompt in prompts] + [0])

    def decode(self) -> torch.Tensor:
        self._send("decode")
        self._last = [token if token == NOT_FINITE else token + 1 for token in self._last]
        return torch.tensor(self._last)

    def _send(self, call: str) -> None:
        assert self.gate.wait(60)
        self.calls.append(call)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def counting() -> CountingPrograms:
    return CountingPrograms()


@pytest.fixture
def counter(counting: CountingPrograms, tokenizer: Any) -> Any:
    """An engine over `counting`, started."""
    engine = make_engine(counting, tokenizer, max_queued=6)  # type: ignore[arg-type]
    engine.start()
    yield engine
    counting.gate.set()
    counting.fails = None
    engine.stop(grace_s=0)
    assert not engine._thread.is_alive()


def letters(first: int, number: int, tokenizer: Any) -> str:
    """What `counting` answers to a prompt that ends in the token before `first`."""
    text: str = tokenizer.decode(range(first, first + number))
    return text


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


# --- On the device --------------------------------------------------------------------------------


@pytest.mark.one_device
def test_texts_are_those_of_generate_in_any_order(
    engine: Engine, expected: Generate, tokenizer: Any
) -> None:
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(2, 320) for _ in range(draw.randint(1, 60))], draw.randint(1, 30))
        for _ in range(24)
    ]
    compiles = spmd.metrics.counter("compiles")
    clients = ask(engine, requests[:16])
    clients[3].ended.wait(60)
    clients += ask(engine, requests[16:])
    for client, request in zip(clients, requests):
        end = client.end()
        tokens = expected(request.prompt, request.max_tokens)
        ends_itself = tokens[-1] == END
        assert end == Finished(
            FinishReason.STOP if ends_itself else FinishReason.LENGTH, len(tokens)
        )
        context = request.prompt[-4:]
        before = tokenizer.decode(context, skip_special_tokens=True)
        if not before.endswith("\ufffd"):
            both = tokenizer.decode([*context, *tokens], skip_special_tokens=True)
            assert before + client.text == both
    assert spmd.metrics.counter("compiles") == compiles


def test_the_same_seed_gives_the_same_text_in_any_company(engine: Engine) -> None:
    asked = Request(range(40, 50), 20, SamplingOptions(1.2, top_k=100, top_p=0.99, seed=5))
    (alone,) = ask(engine, [asked])
    alone.end()
    others = [Request([60 + i], 25, SamplingOptions(1.0, seed=i)) for i in range(7)]
    clients = ask(engine, [*others[:3], asked, *others[3:], asked])
    assert all(isinstance(client.end(), Finished) for client in clients)
    assert [clients[3].text, clients[-1].text] == [alone.text] * 2
    assert len({client.text for client in clients}) > 4


def test_hundreds_of_requests_leave_nothing(engine: Engine) -> None:
    def live() -> int:
        wait_idle(engine)
        gc.collect()
        # By type: some objects of torch warn when they are asked what they are.
        return sum(issubclass(type(o), (Generation, torch.Tensor)) for o in gc.get_objects())

    def ask_many(number: int) -> None:
        for i in range(0, number, 50):
            for client in ask(engine, [Request([2 + j], 3) for j in range(i, i + 50)]):
                client.end()

    compiles = spmd.metrics.counter("compiles")
    ask_many(50)
    before = live()
    ask_many(250)
    assert live() <= before + 2
    assert spmd.metrics.counter("compiles") == compiles


# --- On a counter in place of the device ----------------------------------------------------------


def test_a_step_is_sent_before_the_last_one_is_read(
    counting: CountingPrograms, counter: Engine
) -> None:
    sent_at: list[int] = []
    done = Client()

    def listener(event: Event) -> None:
        if isinstance(event, Piece):
            sent_at.append(counting.calls.count("decode"))
        done(event)

    counter.submit([(Request([39], 5), listener)])
    done.end()
    # The token of the prompt is read after the first decode step was sent, and so on.
    assert sent_at == [1, 2, 3, 4, 4]
    wait_until(lambda: counter.is_idle)
    assert counting.calls == ["prompt 0"] + ["decode"] * 4  # and no step too many


def test_requests_share_steps_and_slots(
    counting: CountingPrograms, counter: Engine, tokenizer: Any
) -> None:
    counting.gate.clear()
    clients = ask(counter, [Request([39 + i], 2 + i) for i in range(6)])
    counting.gate.set()
    for i, client in enumerate(clients):
        assert client.end() == Finished(FinishReason.LENGTH, 2 + i)
        assert client.text == letters(40 + i, 2 + i, tokenizer)
    # As many prompts as one may have tokens, all at once; then the others, while the first go on;
    # then a slot is taken again as soon as its last token was sent.
    assert counting.calls[:3] == ["prompt 0 1 2", "decode", "prompt 0 3"]


def test_a_turn_takes_no_more_of_prompts_than_one_may_have(
    counting: CountingPrograms, counter: Engine
) -> None:
    counting.gate.clear()
    clients = ask(counter, [Request([39] * (LENGTH - 10), 4) for _ in range(2)])
    counting.gate.set()
    assert all(isinstance(client.end(), Finished) for client in clients)
    assert counting.calls[:3] == ["prompt 0", "decode", "prompt 1"]


def test_stop_strings_and_the_end_of_text(counter: Engine, tokenizer: Any) -> None:
    whole = letters(40, 10, tokenizer)
    (stopped,) = ask(counter, [Request([39], 40, stop=(whole[4:6], whole[8:]))])
    assert stopped.end() == Finished(FinishReason.STOP, 6)
    assert stopped.text == whole[:4]
    (held,) = ask(counter, [Request([39], 6, stop=(whole[5] + "never",))])
    assert held.end() == Finished(FinishReason.LENGTH, 6)
    assert held.text == whole[:6]
    (ended,) = ask(counter, [Request([END - 1], 40)])
    assert ended.end() == Finished(FinishReason.STOP, 1) and ended.text == ""


def test_a_cancelled_request_frees_its_slot(counting: CountingPrograms, counter: Engine) -> None:
    counting.gate.clear()
    clients = [Client() for _ in range(6)]
    generations = counter.submit([(Request([39], 80), client) for client in clients])
    generations[0].cancel()
    generations[5].cancel()
    counting.gate.set()
    for client in clients[1:5]:
        assert client.end() == Finished(FinishReason.LENGTH, 80)
    wait_until(lambda: counter.is_idle)
    assert not clients[5].events and not clients[0].ended.is_set()
    assert counter._measures.value("llama_requests_total", outcome="cancelled") == 2
    assert not any(counter._slots)


def test_a_full_queue_takes_all_or_nothing(counting: CountingPrograms, counter: Engine) -> None:
    counting.gate.clear()
    running = ask(counter, [Request([39], 3)])
    wait_until(lambda: any(counter._slots))
    waiting = ask(counter, [Request([39], 3)] * 4)
    message = "at most 6 requests may wait; got 3 more while 4 wait. Try again later."
    with pytest.raises(QueueFullError, match=message):
        ask(counter, [Request([39], 3)] * 3)
    waiting += ask(counter, [Request([39], 3)] * 2)
    counting.gate.set()
    assert all(isinstance(client.end(), Finished) for client in (*running, *waiting))


def test_the_error_of_a_request_stays_with_it(counter: Engine, tokenizer: Any) -> None:
    seen = []

    def broken(event: Event) -> None:
        seen.append(event)
        raise OSError("the client's socket")

    good = Client()
    counter.submit([(Request([39], 30), broken), (Request([49], 30), good)])
    assert good.end() == Finished(FinishReason.LENGTH, 30)
    assert good.text == letters(50, 30, tokenizer)
    assert isinstance(seen[0], Piece) and isinstance(seen[-1], Failed) and len(seen) == 2
    assert "its tokens could not be handed out: OSError" in str(seen[-1].error)
    assert counter.failure is None


def test_logits_that_are_not_finite_fail_their_request(counter: Engine) -> None:
    bad, good = ask(counter, [Request([NO_NUMBER], 5), Request([39], 5)])
    end = bad.end()
    assert isinstance(end, Failed) and isinstance(end.error, RequestFailedError)
    assert "got a NaN or an infinity at token 1. Check the model's weights" in str(end.error)
    assert isinstance(good.end(), Finished)


def test_a_failed_step_reaches_every_request(counting: CountingPrograms, counter: Engine) -> None:
    counting.gate.clear()
    clients = ask(counter, [Request([39], 30) for _ in range(6)])
    counting.fails = RuntimeError("out of memory")
    counting.gate.set()
    message = "a step on the device failed: out of memory. Restart the server."
    for client in clients:
        end = client.end()
        assert isinstance(end, Failed) and isinstance(end.error, EngineFailedError)
        assert str(end.error) == message == str(counter.failure)
    errors = {client.events[-1].error for client in clients}  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="Restart the server") as raised:
            ask(counter, [Request([39], 1)])
        errors.add(raised.value)
    assert len(errors) == len(clients) + 2  # as one error would collect all their tracebacks


def test_a_stop_lets_requests_end_in_time(counting: CountingPrograms, counter: Engine) -> None:
    clients = ask(counter, [Request([39], 30) for _ in range(6)])
    counter.stop(grace_s=60)
    assert [client.end() for client in clients] == [Finished(FinishReason.LENGTH, 30)] * 6
    assert not counter._thread.is_alive()
    with pytest.raises(EngineStoppedError, match=r"the server is shutting down. Ask another one."):
        ask(counter, [Request([39], 1)])


def test_a_stop_ends_what_takes_too_long(counting: CountingPrograms, counter: Engine) -> None:
    counting.gate.clear()
    clients = ask(counter, [Request([39], 80) for _ in range(6)])
    stopping = threading.Thread(target=counter.stop, kwargs={"grace_s": 60})
    stopping.start()
    wait_until(lambda: counter._stop_at is not None)
    second = threading.Thread(target=counter.stop, kwargs={"grace_s": 0})
    second.start()
    counting.gate.set()
    stopping.join(60)
    second.join(60)
    for client in clients:
        end = client.end()
        assert isinstance(end, Failed) and isinstance(end.error, EngineStoppedError)
        assert str(end.error) == "the server shut down. Ask another one."


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 1), "a prompt has at least one token; got none"),
        (Request([2], 0), "max_tokens must be at least 1; got 0"),
        (Request([2] * 90, 7), f"at most {LENGTH} tokens; got 90 and 7. Shorten the prompt"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Request, message: str, counter: Engine) -> None:
    with pytest.raises(ValueError, match=message):
        ask(counter, [request_])


def test_everything_is_counted(tokenizer: Any, counting: CountingPrograms) -> None:
    measures = Measures()
    engine = make_engine(counting, tokenizer, measures=measures)  # type: ignore[arg-type]
    engine.start()
    for client in ask(engine, [Request([39, 40], 5) for _ in range(3)]):
        client.end()
    engine.stop(grace_s=0)
    lines = measures.text().decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    outcomes = [f'llama_requests_total{{outcome="{outcome}"}}' for outcome in OUTCOMES]
    assert [float(samples[name]) for name in outcomes] == [3, 0, 0, 0]
    expected = {
        "llama_prompt_tokens_total": 6,
        "llama_generated_tokens_total": 15,
        "llama_time_to_first_token_seconds_count": 3,
        "llama_time_per_token_seconds_count": 12,
        "llama_queue_length": 0,
        "llama_active_slots": 0,
        "llama_decode_device_seconds_count": counting.calls.count("decode"),
    }
    assert {name: float(samples[name]) for name in expected} == expected
    assert expected["llama_decode_device_seconds_count"] >= 4
    for name in ("host", "device"):
        assert float(samples[f"llama_decode_{name}_seconds_sum"]) >= 0
    assert not any("_created" in name for name in samples)


def test_the_queue_holds_what_is_allowed(engine: Engine) -> None:
    clients = ask(engine, [Request([2 + i], 2) for i in range(QUEUE)])
    assert all(isinstance(client.end(), Finished) for client in clients)
