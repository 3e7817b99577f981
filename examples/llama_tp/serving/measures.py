"""What a server counts and times, as Prometheus text; threads may share it."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

import spmd_core as spmd

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A bound for each eighth of a power of ten is enough for a step, whose time varies little.
_STEP_SECONDS = tuple(round(10 ** (-4 + i / 8), 6) for i in range(41))
OUTCOMES = ("finished", "cancelled", "failed", "refused")


class Histogram:
    """How many values were at most each of some bounds.

    Args:
        bounds: ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        """Counts a value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def mean(self) -> float:
        """The values' mean; 0 without any."""
        with self._lock:
            return self._sum / max(1, sum(self._counts))

    def lines(self, name: str) -> list[str]:
        """The samples in Prometheus' text format."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        lines, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), counts):
            below += count
            label = "+Inf" if bound == float("inf") else repr(bound)
            lines.append(f'{name}_bucket{{le="{label}"}} {below}')
        return [*lines, f"{name}_sum {total!r}", f"{name}_count {below}"]


class Measures:
    """All figures of one server.

    Attributes:
        queue_length, active_slots: asked when the text is made; the engine sets them.
        first_token_s: from a request's arrival to its first token.
        token_s: from a token of a request to its next one.
        decode_host_s: CPU time of the engine's thread for a decode step: recording it, starting it,
            and handing out the tokens of the one before. Waiting takes none.
        decode_device_s: from the start of a decode step, or the end of what ran before it, to its
            end, as the host sees it: exact if the host waits for the step, else too long.
    """

    def __init__(self) -> None:
        self.queue_length: Callable[[], int] = lambda: 0
        self.active_slots: Callable[[], int] = lambda: 0
        self.first_token_s, self.token_s = Histogram(_SECONDS), Histogram(_SECONDS)
        self.decode_host_s = Histogram(_STEP_SECONDS)
        self.decode_device_s = Histogram(_STEP_SECONDS)
        self._requests = dict.fromkeys(OUTCOMES, 0)
        self._tokens = {"prompt": 0, "generated": 0}
        self._lock = threading.Lock()

    def count_request(self, outcome: str) -> None:
        """Counts the end of a request, one of `OUTCOMES`."""
        with self._lock:
            self._requests[outcome] += 1

    def count_tokens(self, kind: str, number: int) -> None:
        """Counts tokens of a kind, "prompt" or "generated"."""
        with self._lock:
            self._tokens[kind] += number

    def num_requests(self, outcome: str) -> int:
        """How many requests ended so."""
        with self._lock:
            return self._requests[outcome]

    def text(self) -> str:
        """Everything, in Prometheus' text format. Does not wait for the device."""
        with self._lock:
            requests, tokens = dict(self._requests), dict(self._tokens)
        lines: list[str] = []

        def add(name: str, kind: str, help_text: str, samples: Sequence[str]) -> None:
            lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *samples])

        name = "llama_requests_total"
        samples = [f'{name}{{outcome="{o}"}} {n}' for o, n in requests.items()]
        add(name, "counter", "Requests by outcome.", samples)
        for kind, number in tokens.items():
            name = f"llama_{kind}_tokens_total"
            add(name, "counter", f"Tokens: {kind}.", [f"{name} {number}"])
        compiles = spmd.metrics.counter("compiles")
        for name, value, help_text in (
            ("llama_queue_length", self.queue_length(), "Requests that wait for a slot."),
            ("llama_active_slots", self.active_slots(), "Slots that hold a request."),
            ("llama_compiles", compiles, "Programs compiled since the start."),
        ):
            add(name, "gauge", help_text, [f"{name} {value}"])
        for name, histogram, help_text in (
            ("llama_time_to_first_token_seconds", self.first_token_s, "Arrival to first token."),
            ("llama_time_per_token_seconds", self.token_s, "A token to the next one."),
            ("llama_decode_host_seconds", self.decode_host_s, "Python's work for a decode step."),
            ("llama_decode_device_seconds", self.decode_device_s, "The device's decode step."),
        ):
            add(name, "histogram", help_text, histogram.lines(name))
        return "\n".join(lines) + "\n"
