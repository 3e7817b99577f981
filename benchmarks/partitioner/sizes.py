"""Are the values of common calls right at sizes that change from run to run, and what compiles?

`program/growing_sizes.py` gives calls that differ in one size a program for many sizes. This takes
the calls of `layouts.py`, lets one of their sizes vary in random order and by random steps, and
compares results and gradients with eager torch at every size: with all dims replicated, and with
random dims split over a mesh of two axes. Where sizes share no program, the notes say why.

Run: python -m benchmarks.partitioner.sizes
         three layouts of each call and size (about 20 minutes)
     python -m benchmarks.partitioner.sizes --calls 'merge*,heads' --layouts 8 --show
         more layouts of some calls
"""

import argparse
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.options import mesh_shape, selected, whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--calls", default="*", help="patterns, joined by commas (default all)")
    parser.add_argument("--layouts", type=whole(), default=3, help="of each call (default 3)")
    parser.add_argument(
        "--mesh", type=mesh_shape(2), default="2,2", help="sizes of the two axes (default 2,2)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of sizes and layouts (default 0)")
    parser.add_argument("--show", action="store_true", help="print the table, write no files")
    args = parser.parse_args()

import torch
from tqdm import tqdm

import spmd_core as spmd
from benchmarks.partitioner.layouts import (
    AXES,
    CALLS,
    SIZES,
    TOLERANCE,
    Call,
    Spec,
    evaluate,
    specs,
)
from benchmarks.partitioner.programs import start
from spmd_core.program import compile_cache, growing_sizes

NAMES = ("B", "T", "D")
RUNS = 7
LARGEST = 24
# A running product of many elements has no accurate digits.
LARGEST_ERROR = 1e3 * TOLERANCE


@dataclass
class Found:
    """The outcome of a call while one of its sizes varied.

    Attributes:
        runs: how often it ran.
        programs: how many programs were compiled.
        wrong: a line for each run with other values than eager torch.
        refusals: how often sizes shared no program, by the reason.
    """

    runs: int = 0
    programs: int = 0
    wrong: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)


def varied(rng: random.Random, place: int) -> Iterator[tuple[int, int, int]]:
    """B, T and D of each run: one varies, in random order, by one or by more.

    Those before the last are of one parity in half of the cases, and the last one may be 1.
    """
    step = rng.choice((1, 1, 2, 3))
    first = rng.randint(4, 8)
    values = [first + step * i for i in range((LARGEST - first) // step + 1)]
    chosen = [*rng.sample(values, min(RUNS - 2, len(values))), rng.randint(3, LARGEST)]
    if rng.random() < 0.3:
        chosen[:4] = range(first, first + 4)
    for value in [*chosen, rng.choice((2, LARGEST))]:
        sizes = [*SIZES["even"]]
        sizes[place] = value
        yield sizes[0], sizes[1], sizes[2]


def _is_right(got: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(got.cpu(), right, rtol=1e-8, atol=LARGEST_ERROR, equal_nan=True)


def examine(call: Call, place: int, mesh: spmd.Mesh, layout: tuple[Spec, ...], seed: str) -> Found:
    """Runs a call at varying sizes under one layout; `()` replicates all tensors."""
    growing_sizes.clear()
    found = Found()
    before = spmd.metrics.counter("compiles")
    for sizes in varied(random.Random(seed), place):
        try:
            operands = call.operands(sizes)
            expected = evaluate(call, [x.clone() for x in operands], "cpu")
        except (IndexError, RuntimeError, ValueError):  # not a size for this call
            continue
        found.runs += 1
        try:
            values = evaluate(call, operands, "xla", mesh, layout)
            spmd.sync()
        except Exception as error:
            found.wrong.append(f"B, T, D = {sizes}, layout {layout}, seed {seed!r}: {error!r}")
            continue
        if not all(_is_right(a, b) for a, b in zip(values, expected, strict=True)):
            found.wrong.append(f"B, T, D = {sizes}, layout {layout}, seed {seed!r}")
    found.programs = spmd.metrics.counter("compiles") - before
    found.refusals.update({*growing_sizes.refusals()})
    compile_cache.clear()
    return found


def drawn_layouts(call: Call, count: int, rng: random.Random) -> list[tuple[Spec, ...]]:
    """Nothing split, then random layouts of the operands and of the result."""
    operands = call.operands("even")
    ndims = [*(x.dim() for x in operands), call.function(*operands).dim()]
    options = [list(specs(ndim)) for ndim in ndims]
    return [(), *(tuple(rng.choice(o) for o in options) for _ in range(count - 1))]


def main(args: argparse.Namespace) -> int:
    names = selected("--calls", args.calls, CALLS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    start()
    spmd.config.warn_of_recompiles = False
    shape = tuple(map(int, args.mesh.split(",")))
    mesh = spmd.Mesh(range(shape[0] * shape[1]), shape, AXES)
    rows, notes, data = [], [], []
    reasons: Counter[str] = Counter()
    for name, place in tqdm(list(itertools.product(names, range(3))), unit="size", disable=None):
        call, seed = CALLS[name], f"{args.seed} {name} {place}"
        tried = drawn_layouts(call, args.layouts, random.Random(seed))
        parts = [
            examine(call, place, mesh, layout, f"{seed} {i}") for i, layout in enumerate(tried)
        ]
        plain, split = parts[0], parts[1:]
        wrong = [line for part in parts for line in part.wrong]
        rows.append(
            [
                name,
                NAMES[place],
                f"{plain.programs} of {plain.runs}",
                f"{sum(p.programs for p in split)} of {sum(p.runs for p in split)}",
                str(len(wrong)),
            ]
        )
        notes += [f"**wrong**: {name}, {line}" for line in wrong]
        for line in wrong:
            tqdm.write(f"wrong: {name}, {line}", file=sys.stderr)
        for part in parts:
            reasons.update(part.refusals)
        data.append({"call": name, "size": NAMES[place], "wrong": wrong, "row": rows[-1]})
    notes += [f"{count} layouts share no program: {why}." for why, count in reasons.most_common(12)]
    title = f"Common calls at sizes that vary, on a mesh of {args.mesh}, against eager torch"
    columns = ["call", "size", "programs of runs", "with split dims", "wrong"]
    table = Table(title, columns, rows, notes)
    if args.show:
        table.show()
    else:
        publish("partitioner_sizes", table, {"calls": data}, folder=args.out)
    return 1 if any(row[-1] != "0" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(args))
