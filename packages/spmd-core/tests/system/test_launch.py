"""`scripts/launch.sh`: environment, output, exit codes, and the end of all processes."""

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
