"""When one of two processes dies, hangs, fails or takes another path, the other one says which.

`benchmarks/process_faults.py` has the program, tries more faults, and measures how soon it is said.
"""

import re
import signal

import launched
import pytest

from benchmarks import process_faults
from benchmarks.process_faults import PROGRAM


def run(fault, folder, *, warn_after_s=30.0, give_up_after_s=300.0):
    """The exit codes and the errors of two processes; `fault` is one of `process_faults.FAULTS`."""
    how, _, victim = fault.rpartition(" ")
    script = folder / "train.py"
    script.write_text(PROGRAM)
    ended = launched.run(
        2,
        lambda rank, port: [script, how, victim, rank, port, warn_after_s, give_up_after_s],
        timeout_s=60,
    )
    return [one.code for one in ended], [one.errors for one in ended]


def line_of(text):
    return 1 + PROGRAM.splitlines().index(text)


@pytest.mark.slow
def test_a_killed_process_is_named(tmp_path):
    codes, errors = run("killed 1", tmp_path)
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL
    assert "process 1 does not answer any more: it was killed, or its host is gone" in errors[0]
    assert "sync(wait=True)" not in errors[0]


@pytest.mark.exhaustive  # as a killed one is
@pytest.mark.slow
def test_a_process_that_sleeps_is_named_with_its_line(tmp_path):
    codes, errors = run("sleep 1", tmp_path, warn_after_s=3.0, give_up_after_s=6.0)
    assert codes[0] == 1 and codes[1] != 0
    where = rf"process 1 has been at .*train.py:{line_of('        time.sleep(10_000)')} \(fault\)"
    warning, error = (
        next(line for line in errors[0].splitlines() if line.startswith(start))
        for start in ("spmd_core: ", "spmd_core.errors.ProcessError: ")
    )
    assert re.search(f"{where} for [0-9]+ s. Look at its output. All end if it does not", warning)
    assert re.search(f"the others have waited for 6 s: .*{where}.*raise spmd.config.process", error)
    assert warning in errors[1]


@pytest.mark.exhaustive  # as another path does
@pytest.mark.slow
def test_an_exception_reaches_the_others(tmp_path):
    found = process_faults.run("exception 1", tmp_path)
    assert found.codes == [1, 1] and "ValueError: no such file" in found.errors[1]
    assert "process 1 has failed: ValueError: no such file. Look at its output." in found.errors[0]
    assert found.told_s < 30


@pytest.mark.slow
def test_another_path_is_told_with_its_lines(tmp_path):
    codes, errors = run("path 1", tmp_path)
    line = line_of("            loss = loss + w.amax()  # the line that differs")
    assert codes == [1, 1]
    for said in errors:
        assert "has aten::amax -> float32[]" in said and f"train.py:{line}" in said


@pytest.mark.exhaustive  # as another operation is
def test_a_read_in_one_process_alone_is_told(tmp_path):
    codes, errors = run("read 1", tmp_path)
    line = line_of("            w.cpu()  # the read that differs")
    assert codes == [1, 1]
    for said in errors:
        assert f"train.py:{line} has read of float32[4, 3]" in said


@pytest.mark.slow
def test_sigterm_in_one_process_stops_both_after_the_same_step(tmp_path):
    codes, errors = run("stop 1", tmp_path)
    assert codes == [0, 0]
    ((first,), (second,)) = (re.findall("stopped after step ([0-9]+)", e) for e in errors)
    assert first == second and int(first) >= 10
