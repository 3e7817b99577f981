"""Continuous batching: a thread that owns the device and answers requests as slots become free."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from examples.llama_serving.measures import Measures
from examples.llama_serving.programs import Programs, Prompt
from examples.llama_serving.sampling import NOT_FINITE, SamplingOptions
from examples.llama_serving.text import Detokenizer, StopStrings

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """A request was not answered."""


class QueueFullError(EngineError):
    """The queue of requests is full."""


class EngineStoppedError(EngineError):
    """The engine is shutting down."""


class EngineFailedError(EngineError):
    """A step on the device failed, and with it the engine."""


class RequestFailedError(EngineError):
    """This request alone failed."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: of the continuation; with the prompt, at most the slots' length.
        options: how tokens are chosen.
        stop: strings that end the continuation, and are no part of it.
    """

    prompt: Sequence[int]
    max_tokens: int
    options: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Sequence[str] = ()


class FinishReason(Enum):
    """Why a continuation ended: a stop string or the model's end of text, or `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Piece:
    """Some more text of a continuation."""

    text: str


@dataclass(frozen=True)
class Finished:
    """A continuation's end; `num_tokens` counts its tokens, one that ended the text included."""

    reason: FinishReason
    num_tokens: int


@dataclass(frozen=True)
class Failed:
    """A continuation's end, short of what was asked for."""

    error: EngineError


Event: TypeAlias = Piece | Finished | Failed


class Generation:
    """A request that was taken. Its listener gets pieces, and at last one of the other events."""

    def __init__(
        self,
        request: Request,
        listener: Callable[[Event], None],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.request = request
        self.listener = listener
        self.detokenizer = Detokenizer(tokenizer, request.prompt)
        self.stop = StopStrings(request.stop)
        self.is_cancelled = self.has_ended = False
        self.num_sent = self.num_read = 0  # tokens, by their programs and their values
        self.last_s = time.perf_counter()  # its arrival, then its last token

    def cancel(self) -> None:
        """Ends it without a further event; its slot is free at the next step. From any thread."""
        self.is_cancelled = True


@dataclass(frozen=True)
class _Sent:
    """A program in flight: its tokens, and the generation that each belongs to, by index."""

    tokens: torch.Tensor
    holders: dict[int, Generation]
    start_s: float
    is_decode: bool


class Engine:
    """Answers requests from a bounded queue, all slots at once.

    Each turn of its thread fills free slots, sends a step for all slots, and only then reads the
    tokens of the turn before: the device computes while Python hands out text and records.

    Args:
        programs: of the model, compiled.
        tokenizer: the model's.
        end_tokens: tokens that end a continuation.
        max_queued: requests that may wait for a slot.
        measures: where it counts.
    """

    def __init__(
        self,
        programs: Programs,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_tokens: Sequence[int],
        max_queued: int,
        measures: Measures,
    ) -> None:
        self._programs, self._tokenizer = programs, tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._max_queued, self._measures = max_queued, measures
        self._slots: list[Generation | None] = [None] * programs.num_slots
        self._in_flight: dict[Generation, None] = {}  # taken from the queue, and not at an end
        self._queue: deque[Generation] = deque()
        self._changed = threading.Condition()  # guards the queue and the three below
        self._is_waiting = False
        self._failure: EngineFailedError | None = None
        self._stop_at: float | None = None  # on the clock of `time.perf_counter`
        self._last_end_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        measures.queue_length.set_function(lambda: len(self._queue))
        measures.active_slots.set_function(lambda: sum(slot is not None for slot in self._slots))

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its continuation together."""
        return self._programs.length

    @property
    def max_queued(self) -> int:
        """The most requests that may wait for a slot."""
        return self._max_queued

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is answered, and no program is in flight."""
        with self._changed:
            return self._is_waiting and not self._queue

    @property
    def failure(self) -> EngineFailedError | None:
        """What ended the engine, if a step on the device failed."""
        return self._failure

    def start(self) -> None:
        """Starts the thread; no other may use the device until `stop`."""
        self._thread.start()

    def stop(self, *, grace_s: float) -> None:
        """Takes no more requests, lets those in flight end within `grace_s`, and ends the thread.

        Those that do not end in time fail with EngineStoppedError. Waits for all of this. Of
        several calls, the one that ends first counts.
        """
        with self._changed:
            stop_at = time.perf_counter() + grace_s
            self._stop_at = stop_at if self._stop_at is None else min(stop_at, self._stop_at)
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(
        self, requests: Sequence[tuple[Request, Callable[[Event], None]]]
    ) -> list[Generation]:
        """Queues requests, all of them or none. Does not wait.

        Args:
            requests: each with its listener, which the engine's thread calls with every event; it
                must not block.

        Raises:
            ValueError: a request has no tokens, or more than fit.
            QueueFullError, EngineStoppedError, EngineFailedError: they cannot be taken.
        """
        for request, _ in requests:
            _check(request, self.max_length)
        generations = [Generation(request, tell, self._tokenizer) for request, tell in requests]
        with self._changed:
            if self._failure is not None:
                raise _another(self._failure)
            if self._stop_at is not None:
                raise EngineStoppedError("the server is shutting down. Ask another one.")
            if len(self._queue) + len(requests) > self._max_queued:
                raise QueueFullError(
                    f"at most {self._max_queued} requests may wait; got {len(requests)} more while "
                    f"{len(self._queue)} wait. Try again later."
                )
            self._queue.extend(generations)
            self._changed.notify()
        self._measures.prompt_tokens.inc(sum(len(request.prompt) for request, _ in requests))
        return generations

    # --- The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            unread: list[_Sent] = []
            while unread or self._wait_for_requests():
                start_s = time.thread_time()
                prompts, steps = self._send()
                # A step is sent behind the prompts: their first tokens need not wait for a turn.
                self._read([*unread, *prompts])
                unread = steps
                if steps and not prompts:
                    self._measures.decode_host_s.observe(time.thread_time() - start_s)
        except Exception as error:
            _log.exception("a step on the device failed")
            with self._changed:
                self._failure = EngineFailedError(
                    f"a step on the device failed: {error}. Restart the server."
                )
            self._end_all(self._failure)
        else:
            self._end_all(EngineStoppedError("the server shut down. Ask another one."))

    def _wait_for_requests(self) -> bool:
        """Waits while there is nothing to do; False when the thread shall end."""
        with self._changed:
            while not self._queue and not self._in_flight and self._stop_at is None:
                self._is_waiting = True
                self._changed.wait()
            self._is_waiting = False
            if self._stop_at is None:
                return True
            has_work = bool(self._queue or self._in_flight)
            return has_work and time.perf_counter() < self._stop_at

    def _send(self) -> tuple[list[_Sent], list[_Sent]]:
        """Sends a turn's programs: the prompts that free slots take, and a step of all slots."""
        if self._stop_at is not None and time.perf_counter() >= self._stop_at:
            return [], []
        self._drop_cancelled()
        steps: list[_Sent] = []
        groups = self._programs.sizes.together(self._taken(), lambda x: len(x[1].request.prompt))
        prompts = [self._send_prompts(group) for group in groups]
        holders = {slot: held for slot, held in enumerate(self._slots) if held is not None}
        if holders:
            start_s = time.perf_counter()
            tokens = self._programs.decode()
            steps.append(_Sent(tokens, holders, start_s, is_decode=True))
            for slot, generation in holders.items():
                self._count_sent(slot, generation)
        return prompts, steps

    def _drop_cancelled(self) -> None:
        with self._changed:
            waiting = [generation for generation in self._queue if generation.is_cancelled]
            for generation in waiting:
                self._queue.remove(generation)
        for generation in (*waiting, *self._in_flight):
            if generation.is_cancelled:
                self._end(generation, "cancelled")

    def _taken(self) -> list[tuple[int, Generation]]:
        """The requests that get a free slot in this turn.

        Those in flight wait while prompts are computed, so that a turn takes no more tokens of
        prompts, as they are padded, than one request may have.
        """
        taken: list[tuple[int, Generation]] = []
        room = self.max_length
        free = [slot for slot, held in enumerate(self._slots) if held is None]
        with self._changed:
            while free and self._queue:
                room -= self._programs.sizes.bucket(len(self._queue[0].request.prompt))
                if room < 0:
                    break
                generation = self._queue.popleft()
                self._slots[free[0]] = generation
                self._in_flight[generation] = None
                taken.append((free.pop(0), generation))
        return taken

    def _send_prompts(self, group: Sequence[tuple[int, Generation]]) -> _Sent:
        start_s = time.perf_counter()
        prompts = [
            Prompt(slot, generation.request.prompt, generation.request.options)
            for slot, generation in group
        ]
        first = self._programs.prefill(prompts)
        for slot, generation in group:
            self._count_sent(slot, generation)
        holders = {i: generation for i, (_, generation) in enumerate(group)}
        return _Sent(first, holders, start_s, is_decode=False)

    def _count_sent(self, slot: int, generation: Generation) -> None:
        """Frees the slot if the token that was sent is the last one, which is known before it."""
        generation.num_sent += 1
        if generation.num_sent == generation.request.max_tokens:
            self._slots[slot] = None

    def _read(self, unread: Sequence[_Sent]) -> None:
        """Waits for programs and hands out their tokens, but those of requests that have ended."""
        for sent in unread:
            tokens = sent.tokens.tolist()
            now_s = time.perf_counter()
            if sent.is_decode:
                began_s = max(sent.start_s, self._last_end_s)
                self._measures.decode_device_s.observe(now_s - began_s)
            self._last_end_s = now_s
            for index, generation in sent.holders.items():
                if not generation.has_ended and not generation.is_cancelled:
                    self._hand_out(generation, tokens[index], now_s)

    def _hand_out(self, generation: Generation, token: int, now_s: float) -> None:
        measure = self._measures.token_s if generation.num_read else self._measures.first_token_s
        measure.observe(now_s - generation.last_s)
        generation.last_s = now_s
        generation.num_read += 1
        self._measures.generated_tokens.inc()
        if token == NOT_FINITE:
            message = (
                "the model's logits must be finite; got a NaN or an infinity at token "
                f"{generation.num_read}. Check the model's weights and its dtype."
            )
            self._end(generation, "failed", Failed(RequestFailedError(message)))
            return
        try:
            reason = _add_text(generation, token, self._end_tokens)
        except Exception as error:  # of this request: its tokens, or its listener
            _log.exception("a request failed")
            failure = RequestFailedError(f"its tokens could not be handed out: {error!r}.")
            self._end(generation, "failed", Failed(failure))
            return
        if reason is not None:
            self._end(generation, "finished", Finished(reason, generation.num_read))

    def _end(self, generation: Generation, outcome: str, event: Event | None = None) -> None:
        generation.has_ended = True
        self._in_flight.pop(generation, None)
        self._slots = [None if held is generation else held for held in self._slots]
        self._measures.requests.labels(outcome).inc()
        if event is None:
            return
        try:
            generation.listener(event)
        except Exception:  # its request has ended anyway, and the others go on
            _log.exception("the listener of a request failed")

    def _end_all(self, error: EngineError) -> None:
        with self._changed:
            waiting = list(self._queue)
            self._queue.clear()
        for generation in (*self._in_flight, *waiting):
            self._end(generation, "failed", Failed(_another(error)))


def _another(error: EngineError) -> EngineError:
    """An equal error: one that is raised again and again would keep each traceback."""
    return type(error)(*error.args)


def _check(request: Request, max_length: int) -> None:
    if not request.prompt:
        raise ValueError("a prompt has at least one token; got none. Write something.")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {request.max_tokens}. Raise it.")
    total = len(request.prompt) + request.max_tokens
    if total > max_length:
        raise ValueError(
            f"prompt and max_tokens together must be at most {max_length} tokens; got "
            f"{len(request.prompt)} and {request.max_tokens}. Shorten the prompt or lower "
            "max_tokens."
        )


def _add_text(
    generation: Generation, token: int, end_tokens: frozenset[int]
) -> FinishReason | None:
    """Gives the listener the text that the token adds; returns the reason if that ends it."""
    reason = None
    if token in end_tokens:
        reason = FinishReason.STOP
        text = generation.stop.add(generation.detokenizer.finish())
    else:
        text = generation.stop.add(generation.detokenizer.add(token))
        if not generation.stop.has_stopped and generation.num_read == generation.request.max_tokens:
            reason = FinishReason.LENGTH
            text += generation.stop.add(generation.detokenizer.finish())
    if generation.stop.has_stopped:
        reason = FinishReason.STOP
    elif reason is not None:
        text += generation.stop.finish()
    if text:
        generation.listener(Piece(text))
    return reason
