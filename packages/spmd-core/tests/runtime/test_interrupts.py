"""Signals in the middle of what must be whole: they wait, are not lost, and leave nothing half."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import spmd_core as spmd
from spmd_core.program import execution, one_program
from spmd_core.runtime import interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own, as a shell starts a process in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.protect()
    yield
    assert sys.gettrace() is None
    signal.signal(signal.SIGINT, before)


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def whole(lines: str, **names):
    """A function of these lines, as if it were one of this package that must be whole."""
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    # `press` in C, as the frame of a function of this file would be the user's.
    names = {"press": signal.raise_signal, "done": [], **names}
    exec(compile(f"def whole(*args):\n{body}", execution.__file__, "exec"), names)
    return names["whole"], names["done"]


def interrupted(function, *args) -> KeyboardInterrupt:
    """The KeyboardInterrupt of a call: Python may look for it no sooner than in the loop."""
    reached = []
    try:
        function(*args)
        for step in (1, 2):
            reached.append(step)
    except KeyboardInterrupt as error:
        assert reached in ([], [1])
        return error
    raise AssertionError("not interrupted")


def test_users_code_is_interrupted_at_once():
    interrupted(press)


def test_what_must_be_whole_ends_first():
    inner, done = whole("press(2)\ndone.append(1)\npress(2)\ndone.append(2)")

    interrupted(inner)
    assert done == [1, 2]


def test_it_waits_for_the_outermost():
    inner, _ = whole("press(2)")
    outer, done = whole("inner()\ndone.append(1)", inner=inner)
    interrupted(outer)
    assert done == [1]


def test_users_code_inside_is_interrupted_at_once():
    def closure() -> None:
        press()
        done.append("not reached")

    inner, done = whole("closure()", closure=closure)
    interrupted(inner)
    assert done == []


def test_an_error_inside_does_not_hide_it():
    inner, _ = whole("press(2)\nraise ValueError('inside')")
    assert isinstance(interrupted(inner).__context__, ValueError)


def test_every_handler_runs_once_for_each_signal():
    seen = []

    def end(number: int, frame) -> None:
        seen.append(number)
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, end)
    first = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    spmd.sync()  # a cut looks for handlers that were set since the last one
    assert signal.getsignal(signal.SIGTERM).__wrapped__ is end
    inner, done = whole("press(2)\npress(15)\npress(2)\ndone.append(1)")
    code = None
    try:
        for _ in range(2):
            inner()
    except SystemExit as error:
        code = error.code
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, first)
    assert code == signal.SIGTERM and done == [1]
    assert sorted(seen) == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]


def test_finalizers_lose_no_interruption(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    interrupted(Dying)

    def collected(phase: str, facts) -> None:
        if phase == "stop":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(collected)
    try:
        interrupted(gc.collect)
    finally:
        gc.callbacks.remove(collected)
    assert printed == []


def test_it_is_raised_where_nothing_is_half_made():
    inner, done = whole(
        "press(2)\ndone.append(1)\ncheck()\ndone.append('not reached')",
        check=interrupts.raise_deferred,
    )
    interrupted(inner)
    assert done == [1]
    interrupts.raise_deferred()


def test_waits_are_interrupted_at_once():
    inner, done = whole("press(2)\ndone.append('not reached')")
    interrupts.waits(inner)
    outer, done = whole("inner()", inner=inner, done=done)
    interrupted(outer)
    assert done == []


def test_what_hangs_is_interrupted_by_a_later_signal(monkeypatch):
    monkeypatch.setattr(interrupts, "_MOST_WAIT_S", 0.0)
    inner, done = whole("press(2)\ndone.append(1)\npress(2)\ndone.append('not reached')")
    interrupted(inner)
    assert done == [1]
    interrupts.raise_deferred()  # none waits any more


def test_other_threads_and_other_handlers_are_left_alone():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupts.protect)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.protect()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_interrupted_cut_loses_nothing(monkeypatch, first):
    weights = [torch.zeros(3, device="xla") for _ in range(4)]
    for weight in weights:
        weight.add_(1)
    spmd.sync()
    for weight in weights:  # in place: the program takes over their buffers
        weight.add_(1)
    pressing, _ = whole(
        "if len(done) == first:\n    press(2)\ndone.append(1)\ncommit(*args)",
        first=first,
        commit=one_program._commit,
    )
    monkeypatch.setattr(one_program, "_commit", pressing)
    interrupted(spmd.sync)
    assert [weight.tolist() for weight in weights] == [[2, 2, 2]] * 4


def test_an_interruption_while_lowering_leaves_everything_pending(monkeypatch):
    w = torch.full((7, 5), 2.0, device="xla")
    spmd.sync()
    w.mul_(3)
    execute = execution.execute
    pressing, done = whole("press(2)\nexecute(*args)\ndone.append('not reached')", execute=execute)
    monkeypatch.setattr(execution, "execute", lambda live, **_: pressing(live))
    interrupted(spmd.sync)
    monkeypatch.undo()
    assert done == [] and w._handle.value.data is None
    assert w.sum().item() == 210.0


def test_an_interrupted_list_operation_writes_all_or_nothing(monkeypatch):
    tensors = [torch.zeros(2, device="xla") for _ in range(3)]
    handle_write = type(tensors[0]._handle).write
    pressing, _ = whole("write(*args)\npress(2)", write=handle_write)
    monkeypatch.setattr(type(tensors[0]._handle), "write", pressing)
    interrupted(torch._foreach_add_, tensors, 1.0)
    monkeypatch.undo()
    assert [t.tolist() for t in tensors] == [[1.0, 1.0]] * 3
