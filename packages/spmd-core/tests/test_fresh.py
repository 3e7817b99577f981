"""fresh.py: programs run as in an interpreter of their own."""

import os
import signal

import fresh
import pytest

STARTED = """
import atexit, os, sys, threading, time
assert "spmd_core" not in sys.modules and threading.active_count() == 1
print(sys.argv, __name__, os.getcwd(), os.environ["GIVEN"], flush=True)
atexit.register(lambda: print("the end", file=sys.stderr))
if sys.argv[1] == "sleep":
    time.sleep(1000)
if sys.argv[1] == "wrong":
    raise ValueError("no")
sys.exit(int(sys.argv[1]))
"""


def test_output_exit_codes_and_surroundings(tmp_path):
    environment = {"GIVEN": 5}
    found = fresh.run(["-c", STARTED, 3], environment, folder=tmp_path)
    assert found.returncode == 3 and found.stderr == "the end\n"
    assert found.stdout == f"['-c', '3'] __main__ {tmp_path} 5\n"
    script = tmp_path / "script.py"
    script.write_text(STARTED)
    found = fresh.run([script, "wrong"], environment)
    assert found.returncode == 1 and found.stderr.endswith("ValueError: no\nthe end\n")
    assert found.stdout.startswith(f"['{script}', 'wrong'] __main__ ")


def test_options_and_modules(tmp_path):
    (tmp_path / "given.py").write_text(STARTED)
    found = fresh.run(["-W", "error", "-m", "given", 3], {"GIVEN": 5}, folder=tmp_path)
    assert found.returncode == 3 and found.stderr == "the end\n"
    assert found.stdout == f"['{tmp_path}/given.py', '3'] __main__ {tmp_path} 5\n"
    warns = "import warnings; warnings.warn('no')"
    assert "UserWarning: no" in fresh.run(["-W", "error", "-c", warns], {}).stderr
    assert fresh.run(["-W", "error", "-c", warns], {}).returncode == 1


def test_what_was_said_so_far():
    process = fresh.Process(["-c", STARTED, "sleep"], {"GIVEN": ""})
    assert "__main__" in process.until(lambda said: said.endswith("\n"))
    with pytest.raises(TimeoutError, match=r"it has written .*__main__"):
        process.until(lambda said: "more" in said, 0.1)
    process.end()
    process = fresh.Process(["-c", STARTED, 0], {"GIVEN": ""})
    assert "__main__" in process.until(lambda said: "more" in said)  # it has ended
    process.end()


def test_what_does_not_end_is_killed():
    process = fresh.Process(["-c", STARTED, "sleep"], {"GIVEN": ""})
    with pytest.raises(TimeoutError):
        process.wait(0.2)
    process.end()
    assert process.wait() == -signal.SIGKILL


def test_xla_reads_its_flags_in_each():
    code = "import jax; print(jax.device_count())"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    assert fresh.run(["-c", code], environment).stdout == "3\n"


def test_what_jax_has_read_is_refused():
    with pytest.raises(AssertionError, match="jax has read its variables"):
        fresh.Process(["-c", ""], {"JAX_PLATFORMS": "no"})
