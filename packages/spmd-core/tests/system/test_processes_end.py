"""When one of two processes dies, fails or takes another path, the other one ends and says why."""

import signal

import launched
import pytest

PROGRAM = """
import os, signal, sys
import torch
import spmd_core as spmd

how, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
spmd.simulate(2)
spmd.initialize(f"127.0.0.1:{port}", 2, rank, timeout_s=120, heartbeat_timeout_s=10)
spmd.use_spmd()
spmd.config.record_source_lines = how == "path"
mesh = spmd.Mesh(range(4), (4,), ("x",))
w = spmd.mark_sharding(torch.arange(12.0).reshape(4, 3).to("xla"), mesh, ("x",))
for step in range(12):
    loss = (w * w).sum()
    if step == 10 and rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "failed":
            raise ValueError("no such file")
        if how == "path":
            loss = loss + w.amax()  # the line that differs
        if how == "read":
            w.cpu()  # the read that differs
    w = w * 0.9
    spmd.sync()
    loss.item()
"""


def ends(how, folder):
    """What happens to process 1 -> the exit codes, and what was written to stderr."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    ended = launched.run(2, lambda rank, port: [script, how, port, rank])
    return [one.code for one in ended], [one.errors for one in ended]


@pytest.mark.slow
def test_a_killed_process_is_named(tmp_path):
    codes, errors = ends("killed", tmp_path)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in errors[0]


@pytest.mark.slow
def test_an_exception_reaches_the_others(tmp_path):
    codes, errors = ends("failed", tmp_path)
    assert codes == [1, 1] and "ValueError: no such file" in errors[1]
    assert "process 1 has failed: ValueError: no such file. Look at its output." in errors[0]


@pytest.mark.slow
def test_another_path_is_told_with_its_lines(tmp_path):
    codes, errors = ends("path", tmp_path)
    line = 1 + PROGRAM.splitlines().index(
        "            loss = loss + w.amax()  # the line that differs"
    )
    assert codes == [1, 1]
    for said in errors:
        assert "has aten::amax -> float32[]" in said and f"train.py:{line}" in said


@pytest.mark.exhaustive  # as another operation is
def test_a_read_in_one_process_alone_is_told(tmp_path):
    codes, errors = ends("read", tmp_path)
    line = 1 + PROGRAM.splitlines().index("            w.cpu()  # the read that differs")
    assert codes == [1, 1]
    for said in errors:
        assert f"train.py:{line} has read of float32[4, 3]" in said
