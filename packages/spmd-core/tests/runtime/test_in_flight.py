"""How many programs are in flight, and which thread hears of a failure."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import spmd_core as spmd
from spmd_core.runtime.in_flight import InFlight


def test_too_many_programs_wait_for_the_oldest():
    waited = []

    class Token:
        def __init__(self, number: int) -> None:
            self.number = number

        def block_until_ready(self) -> None:
            waited.append(self.number)

    spmd.config.max_in_flight_cpu = 2
    programs = InFlight()
    for number in range(4):
        programs.add(Token(number), lambda error: error)
    assert waited == [0, 1] and programs.has_started
    programs.wait_all()
    assert waited == [0, 1, 2, 3]


def test_an_interrupted_wait_forgets_no_program():
    waited = []

    class Token:
        def __init__(self, number):
            self.number, self.is_interrupted = number, number == 1

        def block_until_ready(self):
            waited.append(self.number)
            if self.is_interrupted:
                self.is_interrupted = False
                raise KeyboardInterrupt
            if self.number == 2:
                raise jax.errors.JaxRuntimeError("it failed")

    programs = InFlight()
    for number in range(3):
        programs.add(Token(number), lambda error: spmd.errors.ProgramError(f"explained: {error}"))
    with pytest.raises(KeyboardInterrupt):
        programs.wait_all()
    with pytest.raises(spmd.errors.ProgramError, match="explained: it failed"):
        programs.wait_all()
    assert waited == [0, 1, 1, 2]


def test_a_failure_is_raised_in_the_thread_that_started_the_program():
    class Broken:
        def block_until_ready(self) -> None:
            raise ValueError("INTERNAL: it failed")

    programs = InFlight()
    with ThreadPoolExecutor(1) as pool:

        def explain(error: Exception) -> Exception:
            return spmd.errors.ProgramError(f"theirs: {error}")

        pool.submit(programs.add, Broken(), explain).result()
        programs.wait_all()  # by a thread that has started nothing
        with pytest.raises(spmd.errors.ProgramError, match="theirs: INTERNAL: it failed"):
            pool.submit(programs.wait_all).result()
        pool.submit(programs.wait_all).result()  # says it once
        pool.submit(programs.add, Broken(), explain).result()
        programs.wait_all()
    with pytest.raises(spmd.errors.ProgramError, match="theirs: INTERNAL: it failed"):
        programs.wait_all()  # of a thread that has ended
