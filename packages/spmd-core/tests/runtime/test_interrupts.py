"""Ctrl-C between statements that belong together."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import execution
from spmd_core.runtime import interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own, as a shell starts a process in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_handler_runs_once_at_the_end():
    done = []
    before = signal.getsignal(signal.SIGINT)

    def run() -> None:
        with interrupts.put_off():
            press()
            press()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == [1] and signal.getsignal(signal.SIGINT) is before


def test_an_error_inside_does_not_hide_it():
    before = signal.getsignal(signal.SIGINT)

    def run(presses: int) -> None:
        with interrupts.put_off():
            for _ in range(presses):
                press()
            raise ValueError("inside")

    with pytest.raises(KeyboardInterrupt) as caught:
        run(1)
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(ValueError, match="inside"):
        run(0)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_and_other_handlers_are_left_alone(monkeypatch):
    handlers = []

    def run() -> None:
        with interrupts.put_off():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    run()
    monkeypatch.undo()
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_interrupted_cut_loses_nothing(monkeypatch, first):
    weights = [torch.zeros(3, device="xla") for _ in range(4)]
    for weight in weights:
        weight.add_(1)
    spmd.sync()
    for weight in weights:  # in place: the program takes over their buffers
        weight.add_(1)
    commit, calls = execution._commit, []

    def interrupted(*args) -> None:
        if len(calls) == first:
            press()
        calls.append(args)
        commit(*args)

    monkeypatch.setattr(execution, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spmd.sync()
    assert [weight.tolist() for weight in weights] == [[2, 2, 2]] * 4
