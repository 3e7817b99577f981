"""The times of a loader's stages: counters, and a table that shows which stage is slowest."""

import dataclasses
import threading

# If the loop waits for less than this share of its time, the input is not the bottleneck.
_LITTLE = 0.03
_ADVICE = {
    "reading": "Give the DataLoader more workers (num_workers), or do less per sample",
    "transfer": "Pass more transfer_threads, or send smaller dtypes",
}


@dataclasses.dataclass
class Counters:
    """Sums over all iterations of a loader. Several threads add to them.

    Attributes:
        batches: given to the training loop.
        bytes: of the tensors that were moved to the device, in host memory.
        read_s: waiting for the wrapped loader.
        transfer_s: moving batches to the device, summed over the threads.
        room_s: the reader waiting for space in the queue: the time that the input is ahead.
        first_wait_s: the loop waiting for the first batch of each iteration.
        wait_s: the loop waiting for the other batches.
        step_s: the loop between getting a batch and asking for the next.
        ready: batches that were ready when the loop asked, summed over its requests.
        requests: how often the loop asked for a batch, without the first time of an iteration.
    """

    batches: int = 0
    bytes: int = 0
    read_s: float = 0.0
    transfer_s: float = 0.0
    room_s: float = 0.0
    first_wait_s: float = 0.0
    wait_s: float = 0.0
    step_s: float = 0.0
    ready: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, name: str, amount: float) -> None:
        """Adds to one of the sums."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def values(self) -> dict[str, float]:
        """The sums by name."""
        with self._lock:
            return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def means(now: dict[str, float], before: dict[str, float] | None = None) -> dict[str, float]:
    """Means per batch, of what was added to the sums since `before`.

    Returns:
        `read_ms`, `transfer_ms`, `wait_ms` and `step_ms`: milliseconds of a batch; `wait_share`:
        the part of the loop's time in which it waited; `queue_depth`: batches that were ready when
        the loop asked; `megabytes`: of a batch.
    """
    added = {name: value - (before or {}).get(name, 0) for name, value in now.items()}
    batches, requests = max(added["batches"], 1), max(added["requests"], 1)
    loop_s = added["wait_s"] + added["step_s"]
    return {
        "read_ms": 1e3 * added["read_s"] / batches,
        "transfer_ms": 1e3 * added["transfer_s"] / batches,
        "wait_ms": 1e3 * added["wait_s"] / requests,
        "step_ms": 1e3 * added["step_s"] / batches,
        "wait_share": added["wait_s"] / loop_s if loop_s else 0.0,
        "queue_depth": added["ready"] / requests,
        "megabytes": added["bytes"] / batches / 1e6,
    }


def report(sums: dict[str, float], *, prefetch: int, transfer_threads: int) -> str:
    """A table of the stages, and a sentence that says whether the input is the bottleneck.

    Args:
        sums: of `Counters.values()`.
        prefetch: as the loader's.
        transfer_threads: as the loader's.
    """
    mean, batches = means(sums), int(sums["batches"])
    rows = [("stage", "total", "per batch", "")]
    for name, total_s, ms, note in (
        ("reading", sums["read_s"], mean["read_ms"], "the wrapped loader"),
        (
            "transfer",
            sums["transfer_s"],
            mean["transfer_ms"],
            f"{transfer_threads} thread{'s' * (transfer_threads > 1)}, "
            f"{mean['megabytes']:.2f} MB per batch",
        ),
        ("first waits", sums["first_wait_s"], None, "one in each iteration"),
        ("loop waits", sums["wait_s"], mean["wait_ms"], f"{mean['wait_share']:.1%} of its time"),
        ("loop works", sums["step_s"], mean["step_ms"], ""),
    ):
        rows.append((name, f"{total_s:.2f} s", "" if ms is None else f"{ms:.2f} ms", note))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows
    ]
    lines.append(f"{batches:,} batches; {mean['queue_depth']:.1f} of {prefetch} were ready.")
    return "\n".join([*lines, _verdict(sums, mean, prefetch, transfer_threads)])


def _verdict(sums: dict[str, float], mean: dict[str, float], prefetch: int, threads: int) -> str:
    if sums["requests"] < 2:
        return "Too few batches to tell whether the input is the bottleneck."
    if mean["wait_share"] <= _LITTLE:
        return f"The input is not the bottleneck: the loop waited {mean['wait_share']:.1%}."
    stages = {"reading": mean["read_ms"], "transfer": mean["transfer_ms"] / threads}
    slowest = max(stages, key=lambda name: stages[name])
    said = (
        f"The input is the bottleneck: the loop waited {mean['wait_share']:.1%}. "
        f"Its slowest stage is {slowest}, with {stages[slowest]:.2f} ms per batch beside "
        f"{mean['step_ms']:.2f} ms of the loop's work. "
    )
    if not prefetch:
        return said + "With prefetch=0 nothing is done ahead: pass prefetch=2."
    if stages[slowest] < mean["step_ms"]:
        return said + "Its time varies: pass a larger prefetch."
    return said + f"{_ADVICE[slowest]}."
