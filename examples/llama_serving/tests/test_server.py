"""Signals end a server at any moment, and none is lost."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from examples.llama_serving.app import Served, make_app
from examples.llama_serving.engine import Engine
from examples.llama_serving.measures import Measures
from examples.llama_serving.programs import Programs
from examples.llama_serving.server import Ending, Server, listening_socket
from examples.llama_serving.tests.tiny import make_engine
from examples.llama_serving.text import PromptEncoder


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def run(programs: Programs, tokenizer: Any, ending: Ending) -> Engine:
    """What `serve` does once the programs are compiled."""
    measures = Measures()
    engine = make_engine(programs, tokenizer, measures=measures)
    served = Served(engine, PromptEncoder(tokenizer), measures, "tiny", 320)
    with listening_socket("127.0.0.1", 0) as listening:
        server = Server(make_app(served), engine, grace_s=1)
        ending.ends(server)
        engine.start()
        try:
            server.run(sockets=[listening])
        finally:
            engine.stop(grace_s=0)
    return engine


def test_a_signal_before_the_server_runs_ends_what_is_done() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        ending, done = Ending(), []
        with ending.caught():
            done.append("loading")
            signal.raise_signal(number)
            done.append("compiling")
        assert done == ["loading"]
        assert ending.was_interrupted == (number == signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Ending().caught():
        raise KeyboardInterrupt  # which no signal made


def test_a_signal_in_the_first_moment_of_serving(
    programs: Programs, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Engine.start

    def interrupted(self: Engine) -> None:
        start(self)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Engine, "start", interrupted)
    ending = Ending()
    with ending.caught():
        engine = run(programs, tokenizer, ending)
    assert not engine._thread.is_alive() and not ending.was_interrupted


@pytest.mark.slow
def test_signals_at_random_moments(programs: Programs, tokenizer: Any) -> None:
    moments = random.Random(0)
    before = {*threading.enumerate()}
    for number in (signal.SIGINT, signal.SIGTERM) * 8:
        ending = Ending()
        wait_s = moments.random() * 0.15

        def send(number: int = number, wait_s: float = wait_s) -> None:
            time.sleep(wait_s)
            os.kill(os.getpid(), number)

        sender = threading.Thread(target=send)
        with ending.caught():
            sender.start()
            run(programs, tokenizer, ending)
        sender.join()
        assert ending.was_interrupted == (number == signal.SIGINT)
        for thread in {*threading.enumerate()} - before:
            if thread.name == "engine":
                thread.join(30)
                assert not thread.is_alive()
