"""One process compiles what several need at once, whatever becomes of it; the others read it."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import fresh
import launched
import pytest
from tiers import by_tier

from spmd_core import counters
from spmd_core.config import config
from spmd_core.runtime import compile_turns
from spmd_core.runtime.compile_turns import Turn, taken
from spmd_core.runtime.disk_cache import ProgramCache

pytestmark = pytest.mark.skipif(compile_turns.fcntl is None, reason="needs locks of files")
KEY = "jit_step-0123"
# Takes the turn, says so, and compiles until it is killed.
OWNER = """
import sys, time
from pathlib import Path
from spmd_core.runtime.compile_turns import taken
with taken(stores=True) as turn:
    assert turn.after_miss(Path(sys.argv[1]), sys.argv[2], lambda: None) is None
    print("has it", flush=True)
    time.sleep(300)
"""


def told(folder: Path, on_miss: Callable[[], None]) -> ProgramCache:
    """The folder's cache, which tells when it has found no entry: a wait for one follows."""
    cache = ProgramCache(folder)
    read = cache._read

    def reading(key: str) -> bytes | None:
        found = read(key)
        on_miss()
        return found

    cache._read = reading
    return cache


def waiting(folder: Path, results: list[bytes | None]) -> threading.Thread:
    """A thread that looks for the entry in a turn of its own, and has found none."""
    has_missed = threading.Event()
    cache = told(folder, has_missed.set)

    def look() -> None:
        with taken(stores=True):
            results.append(cache.get(KEY))

    thread = threading.Thread(target=look)
    thread.start()
    has_missed.wait()
    return thread


def locks(folder: Path) -> list[Path]:
    return [*folder.glob("*" + compile_turns.SUFFIX)]


def test_who_waits_takes_what_was_compiled(tmp_path):
    cache, found = ProgramCache(tmp_path), []
    before = counters.counter("programs_of_other_processes")
    with taken(stores=True) as turn:
        assert cache.get(KEY) is None and turn.key == KEY
        threads = [waiting(tmp_path, found) for _ in range(3)]
        assert all(thread.is_alive() for thread in threads) and not found
        cache.put(KEY, b"program")
        assert turn.key is None
    for thread in threads:
        thread.join()
    assert found == [b"program"] * 3 and not locks(tmp_path)
    assert counters.counter("programs_of_other_processes") == before + 3
    assert cache.get(KEY) == b"program"  # in no turn


def test_after_a_failure_all_compile_at_once(tmp_path):
    cache, found = ProgramCache(tmp_path), []
    with suppress(ValueError), taken(stores=True):
        assert cache.get(KEY) is None
        threads = [waiting(tmp_path, found) for _ in range(3)]
        raise ValueError("does not compile")
    for thread in threads:
        thread.join()
    assert found == [None] * 3 and not locks(tmp_path)


def test_other_keys_and_outside_of_a_turn_nobody_waits(tmp_path):
    cache = ProgramCache(tmp_path)
    with taken(stores=True):
        assert cache.get(KEY) is None
        with taken(stores=True) as inner:
            assert cache.get("jit_step-4567") is None and inner.key == "jit_step-4567"
        assert compile_turns.this_thread.turn.key == KEY
        assert len(locks(tmp_path)) == 1
    assert cache.get(KEY) is None
    assert compile_turns.this_thread.turn is None and not locks(tmp_path)


def test_nobody_waits_for_a_process_that_stores_nothing(tmp_path):
    cache, found = ProgramCache(tmp_path), []
    with taken(stores=False) as turn:
        assert cache.get(KEY) is None and turn.key is None
        waiting(tmp_path, found).join()
        assert found == [None]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nobody_waits_for_a_process_that_does_not_go_on(number, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    owner = fresh.Process(["-c", OWNER, tmp_path, KEY], environment)
    try:
        owner.until(lambda said: "has it" in said)
        found: list[bytes | None] = []
        thread = waiting(tmp_path, found)
        assert thread.is_alive() and not found
        os.kill(owner.pid, number)
        thread.join(60)
        assert found == [None]
    finally:
        owner.end()
    with taken(stores=True) as turn:  # what the process left behind is in nobody's way
        assert ProgramCache(tmp_path).get(KEY) is None and turn.key == KEY
    assert not locks(tmp_path)


def test_ctrl_c_ends_a_wait_at_once(tmp_path):
    has_lock, may_end = threading.Event(), threading.Event()
    # The wait, which nobody ends, is reached before or in the meantime.
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    cache = told(tmp_path, timer.start)

    def own() -> None:
        with taken(stores=True):
            assert ProgramCache(tmp_path).get(KEY) is None
            has_lock.set()
            may_end.wait()

    owner = threading.Thread(target=own)
    owner.start()
    has_lock.wait()
    try:
        with pytest.raises(KeyboardInterrupt), taken(stores=True):
            cache.get(KEY)
    finally:
        may_end.set()
        owner.join()
    assert compile_turns.this_thread.turn is None


def test_a_folder_without_locks(tmp_path, monkeypatch):
    turn = Turn(stores=True)
    assert turn.after_miss(tmp_path / "none", KEY, lambda: b"not asked") is None

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(compile_turns.fcntl, "flock", refuse)
    assert turn.after_miss(tmp_path, KEY, lambda: b"not asked") is None
    monkeypatch.setattr(compile_turns, "fcntl", None)
    assert turn.after_miss(tmp_path, KEY, lambda: b"not asked") is None
    turn.end()


def test_leftovers_are_dropped_with_old_entries(tmp_path, monkeypatch):
    cache = ProgramCache(tmp_path)
    left = tmp_path / f"0123.abcd{compile_turns.SUFFIX}"
    left.write_bytes(b"1")
    os.utime(left, (1, 1))
    monkeypatch.setattr(config, "max_cache_bytes", 1000)
    for number in range(3):
        cache.put(f"k{number}", bytes(400))
    assert not left.exists()


# A step over the devices of two processes; prints how many programs jax looked for and found.
STEP = """
import json, sys
import jax, torch
import spmd_core as spmd
counts = {}
def count(name, **_):
    counts[name] = counts.get(name, 0) + 1
jax.monitoring.register_event_listener(count)
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
spmd.simulate(2)
spmd.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
spmd.use_spmd()
mesh = spmd.Mesh(range(4), (4,), ("x",))
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8).to("xla")
for p in layer.parameters():
    spmd.mark_sharding(p, mesh, ("x",) + (None,) * (p.dim() - 1))
x = spmd.mark_sharding(torch.ones(8, 8).to("xla"), mesh, ("x", None))
layer(x).square().mean().backward()
total = layer.weight.grad.sum().item()
found = [counts.get(f"/jax/compilation_cache/{name}", 0)
         for name in ("compile_requests_use_cache", "cache_hits")]
open(f"{folder}/{rank}.json", "w").write(json.dumps([total, *found]))
"""


def test_two_processes_compile_each_program_once_and_never_again(tmp_path):
    environment = {"SPMD_CACHE_DIR": str(tmp_path / "programs")}
    runs = []
    for _ in range(by_tier(1, in_all=2)):
        launched.succeed(
            2,
            lambda rank, port: ["-c", STEP, tmp_path, port, rank],
            env=lambda rank, port: environment,
        )
        runs.append([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])
    (first, other), *later = runs
    assert {total for run in runs for total, *_ in run} == {first[0]} != {0}
    num_asked, num_read = first[1] + other[1], first[2] + other[2]
    assert num_asked and num_read == num_asked / 2
    assert all(asked == read > 0 for run in later for _, asked, read in run)
    entries = [path.name for path in (tmp_path / "programs").glob("*-cache")]
    assert len(entries) == num_asked / 2 and not locks(tmp_path / "programs")
