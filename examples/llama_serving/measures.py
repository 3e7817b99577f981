"""What a server counts and times, as metrics of Prometheus; threads may share it."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

import spmd_core as spmd

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OUTCOMES = ("finished", "cancelled", "failed", "refused")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A bound for each eighth of a power of ten is enough for a step, whose time varies little.
_STEP_SECONDS = tuple(round(10 ** (-4 + i / 8), 6) for i in range(41))

disable_created_metrics()  # the time at which each metric was made, as one more series of each


class Measures:
    """All metrics of one server; each is the library's.

    Attributes:
        requests: ended requests; its label `outcome` is one of `OUTCOMES`.
        prompt_tokens, generated_tokens: how many were taken, and how many were handed out.
        queue_length, active_slots: what the engine says when the text is made.
        first_token_s: from a request's arrival to its first token.
        token_s: from a token of a request to its next one.
        decode_host_s: CPU time of the engine's thread for a decode step: recording it, starting it,
            and handing out the tokens of the one before. Waiting takes none.
        decode_device_s: from the start of a decode step, or the end of what ran before it, to its
            end, as the host sees it: exact if the host waits for the step, else too long.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "llama_requests", "Requests by outcome.", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:  # so that each has a sample from the start
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("llama_prompt_tokens", "Tokens: prompt.", registry=registry)
        self.generated_tokens = Counter(
            "llama_generated_tokens", "Tokens: generated.", registry=registry
        )
        self.queue_length = Gauge(
            "llama_queue_length", "Requests that wait for a slot.", registry=registry
        )
        self.active_slots = Gauge(
            "llama_active_slots", "Slots that hold a request.", registry=registry
        )
        compiles = Gauge("llama_compiles", "Programs compiled since the start.", registry=registry)
        compiles.set_function(lambda: spmd.metrics.counter("compiles"))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"llama_{name}_seconds", text, buckets=bounds, registry=registry)

        self.first_token_s = histogram("time_to_first_token", "Arrival to first token.", _SECONDS)
        self.token_s = histogram("time_per_token", "A token to the next one.", _SECONDS)
        self.decode_host_s = histogram(
            "decode_host", "Python's work for a decode step.", _STEP_SECONDS
        )
        self.decode_device_s = histogram(
            "decode_device", "The device's decode step.", _STEP_SECONDS
        )

    def value(self, sample: str, **labels: str) -> float | None:
        """A sample's value, as in `value("llama_requests_total", outcome="failed")`.

        Returns:
            None if there is no such sample.
        """
        return self._registry.get_sample_value(sample, labels)

    def text(self) -> bytes:
        """Everything, as `CONTENT_TYPE` says. Does not wait for the device."""
        return generate_latest(self._registry)
