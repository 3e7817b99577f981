"""What the comparison of result files finds, in made-up files; no test needs a device."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import check
from benchmarks.compared import BENCHMARKS, compare
from benchmarks.report import RESULTS

ENVIRONMENT = {"date": "2026-01-01", "python": "3.11.7", "cores": 2, "jax": "0.10.2"}


def fixed_step(factor: float = 1.0, *, speed: float = 1.0, seed: int = 0) -> dict[str, Any]:
    """A result file: ours takes `factor` times the reference, on a machine of this speed."""
    random = np.random.default_rng(seed)
    names = ("wall", "cpu", "burst_wall", "burst_cpu")
    load = {name: random.lognormal(sigma=0.3, size=20) / speed for name in names}

    def side(times: float) -> dict[str, list[float]]:
        return {
            name: list(times * load[name] * random.lognormal(sigma=0.02, size=20)) for name in names
        }

    return {
        "environment": ENVIRONMENT,
        "shape": {"num_layers": 4},
        "num_devices": 8,
        "activation_marks": False,
        "ours_s": side(0.4 * factor),
        "reference_s": side(0.4),
        "num_ops": 805,
        "compiles": 2,
        "compiles_after_warm_up": 0,
    }


def op_speed(
    *, slower: tuple[int, ...] = (), scatter: float = 0.1, seed: int = 0
) -> dict[str, Any]:
    """40 calls with one sample each; those in `slower` take three times as long."""
    random = np.random.default_rng(seed)
    calls = [
        {
            "name": f"op{n}",
            "variant": "forward",
            "eager": 1e-3 * random.lognormal(sigma=scatter),
            "ours": 1e-3 * random.lognormal(sigma=scatter) * (3 if n in slower else 1),
        }
        for n in range(40)
    ]
    return {"environment": ENVIRONMENT, "calls": calls}


def write(folder: Path, name: str, data: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def moved(run: Any, baseline: Any, name: str = "fixed_step") -> dict[str, float]:
    found = compare(name, run, baseline).movements
    return {m.figure: m.change for m in found if m.is_beyond(0.1)}


def test_noise_is_no_movement() -> None:
    assert moved(fixed_step(seed=1), fixed_step(seed=2)) == {}


def test_another_machine_is_no_movement() -> None:
    assert moved(fixed_step(seed=1, speed=10), fixed_step(seed=2)) == {}


@pytest.mark.parametrize("factor", [1.2, 0.8])
def test_a_movement_up_and_down_is_found(factor: float) -> None:
    found = moved(fixed_step(factor, seed=1, speed=3), fixed_step(seed=2))
    assert set(found) == {f"ours_s.{name}" for name in ("wall", "cpu", "burst_wall", "burst_cpu")}
    assert list(found.values()) == pytest.approx([factor - 1] * 4, abs=0.05)


def test_a_count_has_no_noise() -> None:
    run = fixed_step()
    run |= {"compiles": 3, "compiles_after_warm_up": 1, "num_ops": 806}  # of 805
    assert moved(run, fixed_step()) == {"compiles": 0.5, "compiles_after_warm_up": float("inf")}


def test_single_samples_are_judged_by_how_much_all_scatter() -> None:
    assert moved(op_speed(seed=1), op_speed(seed=2), "op_speed") == {}
    found = moved(
        op_speed(slower=(7,), seed=1, scatter=0.05), op_speed(seed=2, scatter=0.05), "op_speed"
    )
    assert set(found) == {"calls[op7, forward].ours"}


def test_few_single_samples_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    run, baseline = op_speed(slower=(0,)), op_speed(seed=1)
    run["calls"], baseline["calls"] = run["calls"][:5], baseline["calls"][:5]
    found = compare("op_speed", run, baseline)
    assert all(m.noise is None and not m.is_beyond(0) for m in found.movements)
    table, num_worse = check.report([found], least=0.1)
    assert num_worse == 0 and table.rows == []
    assert "not judged, by a single sample or a time of 0: calls[op0, forward].ours" in str(
        table.notes
    )


def test_what_takes_no_time_has_no_ratio() -> None:
    run, baseline = op_speed(), op_speed()
    run["calls"][3]["ours"] = 0.0
    baseline["calls"][4]["eager"] = 0.0
    found = compare("op_speed", run, baseline)
    unknown = {m.figure for m in found.movements if m.noise is None}
    assert unknown == {f"calls[op{n}, forward].ours" for n in (3, 4)}
    assert not any(m.is_beyond(0) for m in found.movements)


def test_entries_come_and_go_and_repeat() -> None:
    run, baseline = op_speed(), op_speed()
    baseline["calls"][0]["name"] = "old"
    run["calls"][1] = {"name": "op1", "variant": "forward", "skipped": "no sample"}
    run["calls"].append(run["calls"][5])
    found = compare("op_speed", run, baseline)
    assert found.gone == ("calls[old, forward].ours", "calls[op1, forward].ours")
    assert found.new == ("calls[op0, forward].ours", "calls[op5, forward, 2].ours")
    assert len(found.movements) == 38


def test_a_list_of_failures_counts() -> None:
    baseline = {"environment": ENVIRONMENT, "failures": []}
    assert moved(baseline | {"failures": ["a"]}, baseline, "partitioner") == {
        "failures": float("inf")
    }


def run_main(*arguments: Any) -> int:
    return check.main([str(a) for a in arguments])


def test_the_exit_code_tells_of_what_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "before", "fixed_step", fixed_step(seed=1))
    for factor, code, word in ((1.0, 0, "0 moved"), (1.3, 1, "worse"), (0.7, 0, "better")):
        run = write(tmp_path / "now", "fixed_step", fixed_step(factor, seed=2))
        assert run_main(run, "--baseline", tmp_path / "before") == code
        assert word in capsys.readouterr().out
    assert run_main(run, "--baseline", tmp_path / "before", "--least", 0.9) == 0
    assert "7 figures, 0 moved, typical noise" in capsys.readouterr().out


def test_other_versions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = fixed_step()
    other["environment"] = {**ENVIRONMENT, "jax": "0.12.0", "date": "2026-02-02"}
    write(tmp_path / "before", "fixed_step", fixed_step(seed=1))
    assert run_main(write(tmp_path, "fixed_step", other), "--baseline", tmp_path / "before") == 0
    assert "fixed_step: other versions: jax 0.10.2 to 0.12.0." in capsys.readouterr().out


def test_a_baseline_from_before_a_figure_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = fixed_step()
    del old["ours_s"]["burst_cpu"]
    write(tmp_path / "before", "fixed_step", old)
    run = write(tmp_path, "fixed_step", fixed_step(seed=1))
    assert run_main(run, "--baseline", tmp_path / "before") == 0
    assert "fixed_step: only in the run: ours_s.burst_cpu." in capsys.readouterr().out


def broken(tmp_path: Path, run: Any, baseline: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """The message for a run and a baseline that cannot be compared."""
    write(tmp_path / "before", "fixed_step", baseline)
    path = write(tmp_path / "now", "fixed_step", run)
    assert run_main(path, "--baseline", tmp_path / "before") == 2
    return capsys.readouterr().err


def test_broken_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = fixed_step()
    message = broken(tmp_path, '{"environment": ', good, capsys)
    assert "a result file is JSON; got " in message and "Run its benchmark again." in message
    message = broken(tmp_path, good, '{"compiles": 2}', capsys)
    assert "a result file has an `environment`; got " in message and "before" in message
    incomplete = {k: v for k, v in good.items() if k != "reference_s"}
    message = broken(tmp_path, incomplete, good, capsys)
    assert (
        "a result file of fixed_step has ours_s.wall, reference_s.wall; got one in which that is "
        "missing (KeyError('reference_s')). Run the benchmark again." in message
    )
    message = broken(tmp_path, good | {"ours_s": {"wall": "fast"}}, good, capsys)
    assert "got one in which that is missing (ValueError(" in message


def test_other_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = broken(tmp_path, fixed_step() | {"num_devices": 2}, fixed_step(), capsys)
    assert "got num_devices 2 for fixed_step, and 8 in the baseline" in message
    assert "Run the benchmark with the baseline's." in message


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(tmp_path / "fixed_step.json") == 2
    assert "a result file must exist to be compared; got " in capsys.readouterr().err
    run = write(tmp_path, "fixed_step", fixed_step())
    assert run_main(run, "--baseline", tmp_path / "none") == 2
    assert f"got {tmp_path / 'none' / 'fixed_step.json'} (No such file" in capsys.readouterr().err
    assert run_main(write(tmp_path, "other", fixed_step())) == 2
    message = capsys.readouterr().err
    assert "the benchmarks that are compared are attention, " in message
    assert "Name a result file of one of them." in message


def test_a_negative_least_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_main("--least", -1)
    assert "this is a number of at least 0; got '-1'. Write for" in capsys.readouterr().err


def repository(folder: Path) -> None:
    """A git repository with a committed result."""
    write(folder, "fixed_step", fixed_step(seed=1))
    write(folder, "op_speed", op_speed())
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Results"]):
        subprocess.run([*git, *command], check=True)


def test_the_last_commit_is_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(tmp_path)
    monkeypatch.setattr(check, "RESULTS", tmp_path)
    assert run_main() == 2
    message = capsys.readouterr().err
    assert f"got no file in {tmp_path} that does. Run a benchmark first" in message
    write(tmp_path, "fixed_step", fixed_step(1.3, seed=2))
    write(tmp_path, "memory", {"environment": ENVIRONMENT})  # which no commit has
    assert run_main() == 1
    out = capsys.readouterr().out
    assert "fixed_step: 7 figures, 4 moved" in out and "op_speed" not in out
    assert check.committed("memory", tmp_path) is None
    assert run_main("--baseline", tmp_path / "elsewhere") == 2


def test_a_file_without_a_baseline_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "committed", lambda name: None)
    assert run_main(write(tmp_path, "fixed_step", fixed_step())) == 2
    assert "got none for fixed_step in the last commit. Commit one, or" in capsys.readouterr().err


def test_outside_of_a_repository_a_folder_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(check.CheckError, match=r"in no git repository\. Name a folder"):
        check.committed("fixed_step", tmp_path)


def test_help_says_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main("--help")
    assert ended.value.code == 0 and "Exit code 1 if a figure is worse" in capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_committed_results_have_what_is_compared(name: str) -> None:
    data = check.read(RESULTS / f"{name}.json")
    assert set(BENCHMARKS[name].settings) <= set(data)
    found = compare(name, copy.deepcopy(data), data)
    assert len(found.movements) >= len(BENCHMARKS[name].figures) and not found.gone + found.new
    assert not any(m.is_beyond(0) for m in found.movements)
