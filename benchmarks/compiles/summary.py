"""Summarises outcomes: a table by variant and dtype, the reasons, the overloads."""

from collections import Counter, defaultdict
from typing import Any

import torch

from benchmarks.compiles.outcomes import DTYPES, Status
from benchmarks.compiles.target import CUDA
from benchmarks.report import Table
from spmd_core.planner import topology


def summary(outcomes: list[dict[str, Any]], *, target: str, num_devices: int, limit: int) -> Table:
    """The counts by variant and dtype, with a note for each reason, the commonest first.

    Args:
        outcomes: fields of `Outcome`, one dictionary per entry, variant and dtype.
        target: what was compiled for.
        num_devices: devices that a program used.
        limit: the run's limit of samples per entry and dtype; 0: none.
    """
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    entries: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for o in outcomes:
        counts[o["variant"], o["dtype"]][o["status"]] += 1
        if o["status"] in (Status.FAILS, Status.HOST, Status.READS):
            entries[o["status"], o["reason"]][f"{o['entry']} ({o['variant']}, {o['dtype']})"] = None
    shown = [s for s in Status if s is not Status.EXCLUDED]
    rows = []
    for variant in dict.fromkeys(v for v, _ in counts):
        for dtype in DTYPES:
            c = counts.get((variant, dtype))
            if c is not None:
                total = sum(c[s] for s in shown)
                rows.append([variant, dtype, str(total), *(str(c[s]) for s in shown)])
    version = topology.libtpu_version()
    compiler = "jax's lowering alone" if target == CUDA else f"libtpu {version}"
    notes = [
        f"torch {torch.__version__}, {compiler}, {target}, {num_devices} device(s)"
        + (f"; at most {limit} samples of an entry, evenly spread." if limit else "; all samples.")
    ]
    for status in (Status.FAILS, Status.HOST, Status.READS):
        found = [(reason, names) for (s, reason), names in entries.items() if s == status]
        for reason, names in sorted(found, key=lambda pair: (-len(pair[1]), pair[0])):
            notes.append(f"**{status}**: {_cell(reason)}: {', '.join(names)}.")
    return Table(
        f"torch's operator database compiled for {target}",
        ["variant", "dtype", "entries", *shown],
        rows,
        notes,
    )


def not_compiled(outcomes: list[dict[str, Any]]) -> list[str]:
    """One line for each outcome that does not compile, or not wholly on the device."""
    return [
        f"{o['entry']} {o['variant']} {o['dtype']}: {o['status']}: {o['reason']}"
        for o in outcomes
        if o["status"] not in (Status.COMPILES, Status.EXCLUDED)
    ]


def overloads(outcomes: list[dict[str, Any]]) -> dict[str, str]:
    """For each overload that was met: "compiles", "host", or "not" if it failed in any program."""
    found: dict[str, str] = {}
    for o in outcomes:
        for name in o["compiled"]:
            found.setdefault(name, "compiles")
    for o in outcomes:
        found |= dict.fromkeys(o["host"], "host")
    for o in outcomes:
        found |= dict.fromkeys(o["failed"], "not")
    return dict(sorted(found.items()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
