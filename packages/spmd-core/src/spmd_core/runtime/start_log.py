"""The log of the programs that a process starts, and where it differs from another process's log.

A hash for each start covers all starts before it, so that two processes that publish their newest
hashes find the first start that differs.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_PUBLISHED = 64
NUM_DESCRIBED = 128


@dataclass(frozen=True)
class Start:
    """One start of a program.

    Attributes:
        number: counted from 1 in the group.
        hash: of this start and all before it.
        line: the user's.
        describe: what is started, a line for each operation.
    """

    number: int
    hash: str
    line: str
    describe: Callable[[], list[str]]


class StartLog:
    """The starts of programs over the devices of a group of processes.

    Attributes:
        key: where each process of the group publishes, below `spmd/path/`.
        neighbour: the process with which this one compares.
        starts: the newest, in order.
    """

    def __init__(self, group: tuple[int, ...], process: int) -> None:
        self.key = hashlib.sha256(repr(group).encode()).hexdigest()[:12]
        self.group = group
        self.neighbour = group[group.index(process) - 1]
        self.starts: deque[Start] = deque(maxlen=NUM_DESCRIBED)
        self.num_published = 0
        self.lag = Lag()

    @property
    def count(self) -> int:
        return self.starts[-1].number if self.starts else 0

    def add(self, what: bytes, line: str, describe: Callable[[], list[str]]) -> Start:
        before = self.starts[-1].hash if self.starts else ""
        digest = hashlib.blake2b(before.encode() + what, digest_size=8).hexdigest()
        start = Start(self.count + 1, digest, line, describe)
        self.starts.append(start)
        return start

    def text(self) -> str:
        """What is published."""
        newest = list(self.starts)[-NUM_PUBLISHED:]
        return json.dumps(
            {"last": newest[-1].number, "line": newest[-1].line, "hashes": [s.hash for s in newest]}
        )

    def first_difference(self, published: dict[str, Any]) -> Start | None:
        """The first start that both know and that differs; None if there is none."""
        first = published["last"] - len(published["hashes"]) + 1
        for start in list(self.starts):
            at = start.number - first
            if 0 <= at < len(published["hashes"]) and published["hashes"][at] != start.hash:
                return start
        return None


class Lag:
    """How long the neighbour has been behind, with the same newest start.

    Attributes:
        is_told: whether a warning has been given.
    """

    def __init__(self) -> None:
        self._last: int | None = None
        self._since = 0.0
        self.is_told = False

    def seconds(self, last: int, ahead: int) -> float:
        """Seconds behind; 0 if it is not, or has just started something.

        Args:
            last: the number of the neighbour's newest start.
            ahead: that of this process.
        """
        if last >= ahead or last != self._last:
            self._last, self.is_told = last if last < ahead else None, False
            self._since = time.monotonic()
            return 0.0
        return time.monotonic() - self._since


def difference_text(
    number: int,
    ours: tuple[int, dict[str, Any]],
    theirs: tuple[int, dict[str, Any]],
    num_processes: int,
) -> str:
    """What two processes did at the first start at which they differ, the lower process first."""
    said, threads = [], ""
    pair = sorted((ours, theirs), key=lambda one: one[0])
    mine, other = pair[0][1]["lines"], pair[1][1]["lines"]
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other))
    )
    for process, what in pair:
        lines = what["lines"]
        operation = lines[at] if at < len(lines) else "nothing more"
        said.append(f"process {process} at {what['line']} has {operation}")
        if what.get("threads", 1) > 1:
            threads += (
                f" {what['threads']} threads of process {process} start programs, in an order that "
                "no other process has: let one thread record and end the steps."
            )
    return (
        f"all {num_processes} processes start the same programs with the same numbers; number "
        f"{number} differs from line {at + 1} of its description on: {'; '.join(said)}. Do not let "
        "what is recorded, read or synced, a seed or a learning rate depend on the process "
        f"(spmd.debugging.source_lines() has each operation tell its line).{threads}"
    )
