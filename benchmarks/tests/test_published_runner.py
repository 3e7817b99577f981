"""Running rows: samples, failures, turns and Ctrl-C, with commands that take milliseconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.published import runner
from benchmarks.published.rows import Place, Row, Samples, Store

HERE = Place("abc", {}, {})
WRITE = "import sys; open(sys.argv[1] + '/n', 'w').write(sys.argv[2])"


class FixedProbe:
    """Stands for the process that times a job."""

    def __enter__(self) -> "FixedProbe":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seconds(self) -> float:
        return 0.1


@pytest.fixture(autouse=True)
def fixed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Probe", FixedProbe)


def number(folder: Path, seconds: float) -> Samples:
    return {"n": [float((folder / "n").read_text())]}


def row(name: str, code: str, *arguments: str, rounds: int = 1, **more: object) -> Row:
    command = ("-c", code, *arguments)
    return Row("gpt2", name, command, number, rounds=rounds, **more)  # type: ignore[arg-type]


def test_rows_take_turns_and_finished_ones_are_not_run_again(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = f"open({str(order)!r}, 'a').write(sys.argv[2] + ' ')"
    rows = [row(n, f"{WRITE}; {code}", "{run}", n, rounds=2) for n in ("1", "2")]
    once = row("3", f"{WRITE}; {code}", "{run}", "3")
    store = Store(tmp_path / "out", HERE)
    runner.run(rows[:1], store)
    runner.run(rows, store)
    assert order.read_text() == "1 1 2 2 "
    order.write_text("")
    # Rounds are spread: what runs once stands in the middle.
    runner.run([once, *rows], Store(tmp_path / "other", HERE))
    assert order.read_text() == "1 2 3 1 2 "
    assert [run["probe_s"] for run in store.of(rows[0]).runs] == [0.1, 0.1]
    assert store.of(rows[1])["n"].samples == [2.0, 2.0]
    assert (tmp_path / "out/runs/gpt2/2/round-2/output.txt").exists()


def test_what_is_not_timed_comes_last_and_the_longest_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = f"{WRITE}; open({str(order)!r}, 'a').write(sys.argv[2] + ' ')"
    long = row(
        "long", f"{code}; import time; time.sleep(1)", "{run}", "1", is_timed=False, weight=2
    )
    short = row("short", f"import time; time.sleep(0.5); {code}", "{run}", "2", is_timed=False)
    runner.run([short, long, row("timed", code, "{run}", "3")], Store(tmp_path / "out", HERE))
    assert order.read_text() == "3 1 2 "


def test_a_failed_row_has_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    rows = [
        row("raises", "raise SystemExit('no such mesh')", rounds=3),
        row("writes nothing", "pass"),
        row("good", WRITE, "{run}", "5"),
        row("misses a target", f"{WRITE}; sys.exit(1)", "{run}", "6", exit_codes=(0, 1)),
    ]
    store = Store(tmp_path, HERE)
    runner.run(rows, store)
    found = {r["name"]: r for r in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert [found[r.name]["status"] for r in rows] == ["failed", "failed", "done", "done"]
    assert found["raises"]["reason"].startswith("exit code 1 of -c raise")
    assert found["raises"]["reason"].endswith("no such mesh")
    assert "No such file" in found["writes nothing"]["reason"]


def test_ctrl_c_ends_the_command_and_keeps_the_rest(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from benchmarks.published import runner
from benchmarks.published.rows import Place, Row, Store
read = lambda folder, seconds: {{"n": [1.0]}}
rows = [
    Row("gpt2", "short", ("-c", "pass"), read),
    Row("gpt2", "long", ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"),
        read),
]
try:
    runner.run(rows, Store(Path({str(tmp_path)!r}), Place("abc", {{}}, {{}})))
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    output = tmp_path / "runs/gpt2/long/round-1/output.txt"
    for _ in range(600):
        if output.exists() and output.read_text().endswith("\n"):
            break
        time.sleep(0.05)
    child = int(output.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert process.stderr is not None
    process.stderr.close()
    for _ in range(100):  # it is there until the system's first process has asked for its end
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    (kept,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (kept["name"], kept["status"]) == ("short", "done")


def test_rows_that_are_not_timed_run_beside_each_other(tmp_path: Path) -> None:
    # Each waits for the file of the other.
    wait = "\nwhile not Path(sys.argv[3]).exists(): time.sleep(0.01)"
    code = f"import time; from pathlib import Path; Path(sys.argv[4]).touch(){wait}"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    rows = [
        row("first", f"{WRITE}; {code}", "{run}", "1", a, b, is_timed=False),
        row("second", f"{WRITE}; {code}", "{run}", "2", b, a, is_timed=False),
    ]
    store = Store(tmp_path / "out", HERE)
    runner.run(rows, store)
    assert [store.of(r)["n"].samples for r in rows] == [[1.0], [2.0]]


def test_a_timed_row_runs_alone(tmp_path: Path) -> None:
    code = (
        f"{WRITE}; import os, time; path = {str(tmp_path / 'now')!r}; "
        "os.close(os.open(path, os.O_CREAT | os.O_EXCL)); time.sleep(0.1); os.remove(path)"
    )
    rows = [row(n, code, "{run}", n, is_timed=n != "2") for n in ("1", "2", "3")]
    store = Store(tmp_path / "out", HERE)
    runner.run(rows, store)
    assert [store.of(r).status for r in rows] == ["done"] * 3
