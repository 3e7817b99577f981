"""Runs a sweep's programs in worker processes, and publishes those whose values are not right.

A sweep's module says which programs there are, how one runs and what is right. Here is what all of
them share: several programs are compiled as one, those that disturb each other run alone, a worker
that dies is replaced, and a run that was interrupted goes on from its journal.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import spmd_core as spmd
from benchmarks import workers
from benchmarks.options import selected
from benchmarks.partitioner.examination import num_replicated
from benchmarks.partitioner.programs import start
from benchmarks.report import Table, publish

Program = TypeVar("Program")
Values = TypeVar("Values")


class Kind(Enum):
    """What is wrong with a program."""

    WRONG = "wrong"  # a value is not right
    ERROR = "error"  # it raises, or ends the process
    # Right, with a warning: the partitioner made it invalid, so all tensors were replicated.
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Failure:
    """A program that failed.

    Attributes:
        kind: how.
        text: the program, and what it gave.
    """

    kind: Kind
    text: str


def failures(
    programs: Sequence[Program],
    run: Callable[[Sequence[Program]], Sequence[Values]],
    difference: Callable[[Program, Values], str],
) -> Iterator[Failure]:
    """The programs that fail, each alone, of those that are compiled together.

    Args:
        programs: what runs.
        run: records these, syncs once, and returns what each gave.
        difference: how the values that a program gave differ from the right ones; empty if not.
    """
    try:
        before = num_replicated()
        found = run(programs)
        if num_replicated() == before:
            for program, values in zip(programs, found, strict=True):
                if text := difference(program, values):
                    yield Failure(Kind.WRONG, f"{program}: {text}")
            return
    except Exception:  # of one of them; which one is found below
        spmd.roll_back()
    for program in programs:
        before = num_replicated()
        try:
            (values,) = run([program])
        except Exception as error:
            spmd.roll_back()
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            yield Failure(Kind.ERROR, f"{program}: {text[:300]}")
            continue
        if text := difference(program, values):
            yield Failure(Kind.WRONG, f"{program}: {text}")
        elif num_replicated() > before:
            yield Failure(Kind.REPLICATED, f"{program}")


def answer_of(num_programs: int, found: Iterator[Failure]) -> dict[str, Any]:
    """A task's answer, as JSON has it."""
    answer: dict[str, Any] = {"programs": num_programs, **{kind.value: [] for kind in Kind}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for failure in found:
            answer[failure.kind.value].append(failure.text)
    return answer


def _lost(task: dict[str, Any], what: str) -> dict[str, Any]:
    """The answer where the worker died or was too slow."""
    return answer_of(0, iter([Failure(Kind.ERROR, what)]))


def _failed(answer: Mapping[str, Any]) -> bool:
    return bool(answer[Kind.WRONG.value] or answer[Kind.ERROR.value])


@dataclass(frozen=True)
class Sweep:
    """Programs of named calls, in tasks.

    Attributes:
        module: of the command.
        result: the name of the files of results.
        calls: the names of the calls.
        rows: which fields of a task make a row of the table; the first one is "call".
        tasks: the tasks of these calls, as JSON objects, by the options.
        answer: a worker's answer to a task, by `answer_of`.
        title: of the table, from the number of programs and the options.
    """

    module: str
    result: str
    calls: Sequence[str]
    rows: Sequence[str]
    tasks: Callable[[Sequence[str], argparse.Namespace], list[dict[str, Any]]]
    answer: Callable[[dict[str, Any]], dict[str, Any]]
    title: Callable[[int, argparse.Namespace], str]

    def main(self, args: argparse.Namespace) -> int:
        """The command; returns 1 if some program gave a wrong value or an error.

        Args:
            args: its options, of `sweep_options.parser_of` and the sweep's own.
        """
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the partitioner warns of slow layouts
        if args.worker:
            start()
            workers.serve(self.answer)
            return 0
        names = selected("--calls", args.calls, self.calls)
        tasks = self.tasks(names, args)
        journal = args.out / f"{self.result}.journal"
        answers = workers.run(
            tasks,
            [sys.executable, "-m", self.module, "--worker"],
            lost=_lost,
            jobs=args.jobs,
            timeout_s=args.timeout,
            journal=journal,
            resume=args.resume,
            again=_failed,
            what=self.result,
        )
        failed = any(map(_failed, answers))
        if not failed:
            journal.unlink()
        table, data = self.table(tasks, answers, args)
        if args.show:
            table.show()
        else:
            publish(self.result, table, {"calls": data}, folder=args.out)
        return int(failed)

    def table(
        self,
        tasks: Sequence[dict[str, Any]],
        answers: Sequence[dict[str, Any]],
        args: argparse.Namespace,
    ) -> tuple[Table, list[dict[str, Any]]]:
        """The table and the data of a run, with a row for all tasks that agree in `rows`."""
        kinds = [kind.value for kind in Kind]
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for task, answer in zip(tasks, answers, strict=True):
            own = {field: task[field] for field in self.rows}
            row = found.setdefault(
                tuple(own.values()), {**own, "programs": 0, **{kind: [] for kind in kinds}}
            )
            where = "".join(f"{k} {v}, " for k, v in task.items() if k not in self.rows)
            row["programs"] += answer["programs"]
            for kind in kinds:
                row[kind] += [where + text for text in answer[kind]]
        data = [*found.values()]
        total = sum(row["programs"] for row in data)
        notes = [
            f"**{kind}**: {', '.join(str(row[field]) for field in self.rows)}, {text}"
            for row in data
            for kind in kinds
            for text in row[kind]
        ]
        cells = [
            [str(row[f]) for f in (*self.rows, "programs")] + [str(len(row[k])) for k in kinds]
            for row in data
        ]
        columns = [*self.rows, "programs", *kinds]
        return Table(self.title(total, args), columns, cells, notes), data
