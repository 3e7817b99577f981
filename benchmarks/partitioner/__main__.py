"""Does XLA's partitioner keep the values of random small programs under random layouts?

Each program is one operation of torch's database between other operations, its tensors split over a
mesh in a random way (`programs.py` in `benchmarks/partitioner` says what is drawn), or a chain of
several operations with marks anywhere (`chains.py`), or a training step around a table of uneven
sizes (`table_steps.py`); or such a chain or step with shardings that a search finds
(`searched.py`). Worker processes run them, several in one compilation, and compare with
eager torch. A program that fails is reduced to the smallest one that still fails.

Run: python -m benchmarks.partitioner
         every operation on every mesh (about an hour on two cores)
     python -m benchmarks.partitioner --ops 'index_*,scatter*' --programs 64 --show
         some operations, more programs of each
     python -m benchmarks.partitioner --ops chain --chains 1000 --show
         chains alone, more of them
     python -m benchmarks.partitioner --ops table_step --steps 200 --show
         steps around tables alone, more of them
     python -m benchmarks.partitioner --ops 'searched_*' --searched 60
         those with shardings that a search finds, more of them, as a result of their own
"""

import argparse
import itertools
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

from benchmarks.options import check_names, num_jobs, number, selected, whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.partitioner"
    parser.add_argument("--ops", default="*", help="patterns of entries, separated by commas")
    parser.add_argument(
        "--programs",
        type=whole(0),
        default=12,
        help="programs of each entry on each mesh (default 12)",
    )
    parser.add_argument(
        "--chains", type=whole(0), default=240, help="chains on each mesh (default 240)"
    )
    parser.add_argument(
        "--steps", type=whole(0), default=60, help="steps around tables on each mesh (default 60)"
    )
    parser.add_argument(
        "--searched",
        type=whole(0),
        default=20,
        help="chains, and steps, with shardings that are found, on each mesh (default 20)",
    )
    parser.add_argument(
        "--first", type=whole(0), default=0, help="number of the first one (default 0)"
    )
    parser.add_argument("--meshes", help="numbers, joined by commas (default: all)")
    parser.add_argument("--jobs", type=num_jobs(), default=2, help="worker processes (default 2)")
    parser.add_argument(
        "--timeout", type=number(0.1), default=600, help="limit in seconds of a task (default 600)"
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--show", action="store_true", help="print the table, write no files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

from benchmarks import workers
from benchmarks.opinfo import samples
from benchmarks.partitioner.chains import Chains
from benchmarks.partitioner.examination import Source, examine
from benchmarks.partitioner.programs import MESHES, Entry, start
from benchmarks.partitioner.searched import Searched
from benchmarks.partitioner.table_steps import TableSteps

AT_ONCE = 5  # of what is drawn whole
SEARCHED = (Searched(Chains()), Searched(TableSteps()))
DRAWN: dict[str, Source] = {x.name: x for x in (Chains(), TableSteps(), *SEARCHED)}


def _serve() -> None:
    """A worker process; its answers are objects of `Answer`."""
    start()
    ops = {op.formatted_name: op for op in samples.entries()}
    entries: dict[str, Entry] = {}

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        name = task["entry"]
        if name in DRAWN:
            return asdict(examine(DRAWN[name], task["mesh"], task["seeds"]))
        if name not in entries:
            entries.clear()
            entries[name] = Entry(ops[name])
        if not entries[name].samples:
            return {"num_programs": 0, "failures": []}
        return asdict(examine(entries[name], task["mesh"], task["seeds"]))

    workers.serve(answer)


def _lost(task: dict[str, Any], what: str) -> dict[str, Any]:
    """The answer where the worker died or was too slow."""
    failure = {
        **{name: task[name] for name in ("entry", "mesh")},
        "seed": task["seeds"][0],
        "kind": "error",
        "layout": f"one of the programs {task['seeds'][0]} to {task['seeds'][-1]}",
        "detail": what,
    }
    return {"num_programs": len(task["seeds"]), "failures": [failure]}


def table_of(answers: list[dict[str, Any]], under: str) -> Table:
    """The counts by mesh, with a note for each failure.

    Args:
        answers: those of the workers.
        under: under what the programs ran, for the title.
    """
    counts: Counter[tuple[int, str]] = Counter()
    failures = [f for a in answers for f in a["failures"]]
    for answer in answers:
        counts[answer["mesh"], "programs"] += answer["num_programs"]
    for f in failures:
        counts[f["mesh"], f["kind"]] += 1
    rows = [
        [
            f"{shape} over devices {ids}",
            *(str(counts[number, what]) for what in ("programs", "wrong", "error")),
        ]
        for number, (ids, shape, _) in enumerate(MESHES)
    ]
    notes = [
        f"**{f['kind']}**: {f['entry']} on mesh {MESHES[f['mesh']][1]}, program {f['seed']}: "
        f"{f['layout']}. {f['detail']}".replace("|", "\\|").replace("\n", " ")
        for f in sorted(failures, key=lambda f: (f["kind"], f["entry"], f["mesh"], f["seed"]))
    ]
    return Table(
        f"Random small programs under {under}, against eager torch",
        ["mesh", "programs", "wrong", "error"],
        rows,
        notes,
    )


def main(args: argparse.Namespace) -> int:
    if args.worker:
        _serve()
        return 0
    known = [*(op.formatted_name for op in samples.entries()), *DRAWN]
    names = selected("--ops", args.ops, known)
    if args.meshes:
        check_names("--meshes", args.meshes.split(","), [*map(str, range(len(MESHES)))])
    counts = {Chains.name: args.chains, TableSteps.name: args.steps}
    counts |= {source.name: args.searched for source in SEARCHED}
    tasks = []
    meshes = map(int, args.meshes.split(",")) if args.meshes else range(len(MESHES))
    for name, mesh in itertools.product(names, meshes):
        last = args.first + counts.get(name, args.programs)
        size = AT_ONCE if name in DRAWN else args.programs
        for first in range(args.first, last, size):
            seeds = list(range(first, min(first + size, last)))
            tasks.append({"entry": name, "mesh": mesh, "seeds": seeds})
    journal = args.out / "partitioner.journal"
    answers = workers.run(
        tasks,
        [sys.executable, "-m", "benchmarks.partitioner", "--worker"],
        lost=_lost,
        jobs=args.jobs,
        timeout_s=args.timeout,
        journal=journal,
        resume=args.resume,
        what="entries x meshes",
    )
    journal.unlink()
    # The run of these alone has a table of its own beside that of all.
    are_searched = set(names) <= {source.name for source in SEARCHED}
    under = "shardings that a search finds" if are_searched else "random layouts"
    of_meshes = [{**answer, "mesh": task["mesh"]} for task, answer in zip(tasks, answers)]
    table = table_of(of_meshes, under)
    if args.show:
        table.show()
    else:
        failures = [f for a in answers for f in a["failures"]]
        file = "partitioner_searched" if are_searched else "partitioner"
        publish(file, table, {"failures": failures}, folder=args.out)
    return 1 if any(f["kind"] == "wrong" for a in answers for f in a["failures"]) else 0


if __name__ == "__main__":
    sys.exit(main(args))
