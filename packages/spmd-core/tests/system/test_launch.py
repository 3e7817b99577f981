"""`scripts/launch.sh`: environment, output, exit codes, restarts, and the end of all processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "launch.sh"


def launched(*options, code):
    return subprocess.run(
        [str(SCRIPT), *options, "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_each_process_knows_its_place_and_its_lines_are_marked():
    code = """
import os, sys
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR JAX_NUM_CPU_DEVICES PJRT_DEVICE".split()
print(*(os.environ[name] for name in names))
print("error", file=sys.stderr, end="")
"""
    done = launched("--processes", "2", "--devices-per-process", "4", code=code)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 2 0 127.0.0.1 4 CPU",
        "[1] 1 2 1 127.0.0.1 4 CPU",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[1] error"]


def test_the_failure_of_one_ends_all_with_its_code():
    # Process 0 ends by itself when it sees that process 1 has failed.
    code = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(1)
"""
    done = launched(code=code)
    assert done.returncode == 7
    assert "launch: process 1 ended with exit code 7; ending the others" in done.stderr
    killed = launched(code="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == 128 + signal.SIGKILL and "ended with SIGKILL" in killed.stderr


def test_ctrl_c_ends_all(tmp_path):
    code = f"""
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
open({str(tmp_path)!r} + "/" + str(os.getpid()), "w")
time.sleep(60)
"""
    process = subprocess.Popen(
        [str(SCRIPT), "--processes", "3", "--", sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--processes", "0", "--", "true"], "a whole number from 1 to 256; got '0'"),
        (["--processes", "1000", "--", "true"], "a whole number from 1 to 256; got '1000'"),
        (["--processes", "2,x", "--", "true"], "a whole number from 1 to 256; got 'x'"),
        (["--restarts", "-1", "--", "true"], "a whole number from 0 to 10000; got '-1'"),
        (["--devices-per-process", "9999", "--", "true"], "from 1 to 2048; got '9999'"),
        (["--processes", "2"], "nothing to run; write the command after --"),
        (["--", "no-such-command"], "no-such-command cannot be run"),
    ],
)
def test_what_cannot_be_run_is_said(options, words):
    done = subprocess.run([str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr


def test_help_shows_an_example():
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--devices-per-process" in done.stdout
    assert "scripts/launch.sh --processes 2" in done.stdout


def starts(folder, *options, code):
    """A launch whose processes write a file per start; the numbers of processes of each start."""
    begin = f"""
import os, signal, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
port, start = os.environ["MASTER_PORT"], 1
while os.path.exists(f"{folder}/{{start}}.{{rank}}"):
    start += 1
open(f"{folder}/{{start}}.{{rank}}", "w").write(world)
"""
    done = launched(*options, code=begin + code)
    return done, [path.read_text() for path in sorted(folder.glob("*.0"))]


def test_what_dies_is_started_again_also_with_fewer(tmp_path):
    code = """
if start < 4 and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
print("start", start, "of", world)
"""
    done, numbers = starts(tmp_path, "--processes", "3,2,1", "--restarts", "3", code=code)
    assert done.returncode == 0 and numbers == ["3", "2", "1", "1"]
    assert "[0] start 4 of 1" in done.stdout
    assert done.stderr.count("launch: process 0 ended with SIGKILL; ending the others") == 3
    assert "launch: starting 2 processes again, 1 of 3 restarts" in done.stderr
    assert "launch: starting 1 process again, 3 of 3 restarts" in done.stderr


@pytest.mark.parametrize(
    ("ending", "count", "code"),
    [(75, 3, 75), (1, 3, 1), (2, 1, 2), (130, 1, 130), (0, 1, 0)],
)
def test_what_is_started_again(tmp_path, ending, count, code):
    done, numbers = starts(
        tmp_path, "--processes", "1", "--restarts", "2", code=f"sys.exit({ending})"
    )
    assert (done.returncode, len(numbers)) == (code, count)


TRAINED = """
import os, signal, sys
import torch
import spmd_core as spmd

torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
with spmd.CheckpointManager(FOLDER) as manager:
    begin = manager.latest() or 0
    if begin:
        manager.restore(state)
    for step in range(begin + 1, 7):
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state)
        print(step, loss.item(), flush=True)
        if step == DIES:
            manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_losses_of_another(tmp_path, capfd):
    def program(name, dies):
        code = TRAINED.replace("FOLDER", repr(str(tmp_path / name)))
        return code.replace("DIES", str(dies))

    exec(compile(program("undisturbed", 0), "<train>", "exec"), {})
    expected = [f"[0] {line}" for line in capfd.readouterr().out.splitlines()]
    done = launched("--processes", "1", "--restarts", "1", code=program("killed", 4))
    assert done.returncode == 0, done.stderr
    assert "ended with SIGKILL" in done.stderr and len(expected) == 6
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(("ends_with", "code"), [(75, 75), (1, 143), (None, 143)])
def test_sigterm_is_passed_on_and_restarts_nothing(tmp_path, ends_with, code):
    handler = "signal.SIG_IGN" if ends_with is None else f"lambda *_: sys.exit({ends_with})"
    program = f"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, {handler})
open({str(tmp_path)!r} + "/" + str(os.getpid()), "w")
time.sleep(60)
"""
    options = ["--restarts", "2", "--deadline", "1" if ends_with is None else "30"]
    process = subprocess.Popen([str(SCRIPT), *options, "--", sys.executable, "-c", program])
    try:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == code
    finally:
        process.kill()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [(0, 0, False), (75, 0, True), (75, 99, True), (137, 9, True), (137, 10, False), (1, 0, False)],
)
def test_the_slurm_file_puts_a_preempted_job_back(tmp_path, code, restarts, is_queued):
    """With stand-ins for SLURM's commands."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, text in (("srun", f"exit {code}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT.parents[1] / "docs" / "launch" / "slurm.sbatch"],
        cwd=tmp_path,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code and not done.stderr
    assert done.stdout == ("requeue 17\n" if is_queued else "")
