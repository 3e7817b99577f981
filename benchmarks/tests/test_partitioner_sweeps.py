"""What the sweeps share: which program failed, how, and what a resumed run runs again."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import workers
from benchmarks.partitioner import jax_functions, layouts, pairs
from benchmarks.partitioner.sweeps import Failure, Kind, Sweep, answer_of, failures
from spmd_core import counters


def test_the_program_that_fails_is_found_among_those_that_are_compiled_together() -> None:
    def run(programs: Sequence[int]) -> list[int]:
        if 3 in programs:
            raise ValueError("three\nis refused")
        if 2 in programs:
            counters.count("programs_with_whole_everything")
        return [10 * program for program in programs]

    def difference(program: int, value: int) -> str:
        return "four" if program == 4 else ""

    assert list(failures([0, 1], run, difference)) == []
    assert list(failures([0, 4], run, difference)) == [Failure(Kind.WRONG, "4: four")]
    found = list(failures([*range(5)], run, difference))
    assert found == [
        Failure(Kind.REPLICATED, "2"),
        Failure(Kind.ERROR, "3: ValueError: three is refused"),
        Failure(Kind.WRONG, "4: four"),
    ]
    answer = answer_of(5, iter(found))
    assert answer["programs"] == 5 and answer["wrong"] == ["4: four"]


@pytest.mark.parametrize("sweep", [pairs.SWEEP, layouts.SWEEP, jax_functions.SWEEP])
def test_a_table_has_a_row_for_each_call_and_says_what_failed(sweep: Sweep) -> None:
    args = argparse.Namespace(mesh=None, groups=4, first=0, limit=24, nonfinite=False)
    tasks = sweep.tasks(sweep.calls[:2], args)
    assert len({json.dumps(task) for task in tasks}) == len(tasks)
    found = [Failure(Kind.WRONG, "marks"), Failure(Kind.ERROR, "refused")]
    answers = [answer_of(3, iter(found if task is tasks[-1] else ())) for task in tasks]
    table, data = sweep.table(tasks, answers, args)
    assert [row["call"] for row in data if "uneven" not in row.values()] == [*sweep.calls[:2]]
    assert f"{3 * len(tasks)} " in table.title
    assert len(table.notes) == 2 and table.notes[0].endswith("marks")
    assert table.rows[-1][-4:] == [str(data[-1]["programs"]), "1", "1", "0"]


def test_what_failed_runs_again_when_a_run_is_resumed(tmp_path: Path) -> None:
    code = "from benchmarks import workers\nworkers.serve(lambda task: task['number'] + 100)"

    def run(again: int) -> list[int]:
        return workers.run(
            [{"number": n} for n in range(3)],
            [sys.executable, "-c", code],
            lost=lambda task, what: -1,
            jobs=1,
            timeout_s=60,
            journal=tmp_path / "journal",
            resume=True,
            what="numbers",
            again=lambda answer: answer == again,
        )

    lines = [[{"number": n}, n] for n in range(3)]
    (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(1) == [0, 101, 2]
    assert run(2) == [0, 101, 102]  # what ran again last is what counts
