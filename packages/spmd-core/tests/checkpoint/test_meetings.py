"""Processes meet, or learn in time that one has failed or does not come."""

import pytest

from spmd_core.checkpoint import meetings
from spmd_core.checkpoint.meetings import Meetings
from spmd_core.errors import CheckpointError


class Client:
    """jax's coordination service, of one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, *, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]


@pytest.fixture
def of(monkeypatch):
    """The meetings of each of two processes, as functions that act in its place."""
    client, here = Client(), [0]
    monkeypatch.setattr(meetings, "_client", lambda: client)
    monkeypatch.setattr(meetings.processes, "process_count", lambda: 2)
    monkeypatch.setattr(meetings.processes, "process_index", lambda: here[0])
    both = [Meetings("runs"), Meetings("runs")]

    def act(rank):
        here[0] = rank
        return both[rank]

    return act


def test_they_meet_step_by_step(of):
    for _ in range(2):
        of(0).begin()
        of(1).begin()
        with pytest.raises(
            TimeoutError, match=r"all 2 processes meet .* to 'key' within 0 s\. Look"
        ):
            of(0).meet("key", 0)
        of(1).meet("key", 0)
        with pytest.raises(TimeoutError):
            of(1).meet("next", 0)


def test_a_failure_is_told_and_forgotten_at_the_next_step(of):
    of(0).begin()
    of(1).begin()
    of(1).fail(OSError(28, "No space\nleft"))
    of(1).fail(KeyError())
    of(1).fail(OSError(28, "No space\nleft"))
    with pytest.raises(
        CheckpointError, match=r"failure of process 1: \[Errno 28\] No space left\. Look"
    ):
        of(0).meet("key", 60_000)
    of(0).begin()
    of(1).begin()
    with pytest.raises(TimeoutError):
        of(0).meet("key", 0)
    of(1).meet("key", 0)


def test_one_process_alone_waits_for_nobody(monkeypatch):
    alone = Meetings("runs")
    alone.begin()
    alone.meet("key", 0)
    alone.fail(ValueError())
