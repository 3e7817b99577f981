"""A run that is killed ends with the losses of one that nothing disturbed."""

from pathlib import Path

import pytest

from benchmarks import killed_run


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "apart"), [("2", 0.0), ("2,1", 1e-4)])
def test_it_comes_back_by_itself(processes: str, apart: float, tmp_path: Path) -> None:
    expected, loop_s = killed_run.undisturbed(tmp_path, processes, 40)
    found, losses = killed_run.killed(
        tmp_path, processes, 40, save_every=1, kills=1, loop_s=loop_s, seed=4
    )
    (kill,) = found
    assert kill.count == 2 and kill.again_s < 60
    assert len(losses) < 40  # it went on
    assert losses == pytest.approx(expected[-len(losses) :], abs=apart, rel=0)
