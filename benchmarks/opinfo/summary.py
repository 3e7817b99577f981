"""Summarises verdicts: a table by variant and dtype, the entries that fail, the overloads seen."""

from collections import Counter, defaultdict
from typing import Any

import torch

from benchmarks.opinfo.cases import KNOWN, Status
from benchmarks.opinfo.samples import DTYPES_BY_NAME, VARIANTS
from benchmarks.report import Table


def summary(verdicts: list[dict[str, Any]], *, num_devices: int, limit: int) -> Table:
    """The counts by variant and dtype, with a note for each failure and each loose pass.

    Args:
        verdicts: fields of `Verdict`, one dictionary per entry, variant and dtype.
        num_devices: devices that the run used.
        limit: the run's limit of samples per entry and dtype; 0: none.
    """
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        counts[v["variant"], v["dtype"]][v["status"]] += 1
        counts[v["variant"], v["dtype"]]["loose"] += v["status"] == Status.PASSED and v["loose"] > 0
    rows = []
    for variant in VARIANTS:
        for dtype in DTYPES_BY_NAME:
            c = counts.get((variant, dtype))
            if c is None:
                continue
            applicable = sum(c[s] for s in Status) - c[Status.EXCLUDED]
            share = f"{100 * c[Status.PASSED] / applicable:.1f}%" if applicable else "-"
            rows.append(
                [
                    variant,
                    dtype,
                    str(applicable),
                    *(str(c[s]) for s in Status if s is not Status.EXCLUDED),
                    share,
                    str(c["loose"]),
                    str(c[Status.EXCLUDED]),
                ]
            )
    columns = [
        "variant",
        "dtype",
        "applicable",
        "passed",
        "host fallback",
        "error",
        "wrong",
        "passed %",
        "of these loose",
        "excluded",
    ]
    notes = [
        f"torch {torch.__version__}, {num_devices} device(s)"
        + (
            ", the first tensor of every sample split along its longest dim"
            if num_devices > 1
            else ""
        )
        + (f"; at most {limit} samples of an entry, evenly spread." if limit else "; all samples."),
        "Excluded: "
        + "; ".join(
            sorted(
                {
                    f"{v['entry']} ({v['detail']})"
                    for v in verdicts
                    if v["status"] == Status.EXCLUDED
                }
            )
        )
        + ".",
    ]
    for status in (Status.WRONG, Status.ERROR, Status.HOST):
        for v in verdicts:
            if v["status"] == status:
                cause = KNOWN.get((v["entry"], v["variant"]), ("", ""))[1]
                notes.append(
                    f"**{status}**: {v['entry']}, {v['variant']}, {v['dtype']}: "
                    f"{cause or _cell(v['detail'])}"
                )
    deviations: dict[str, float] = {}
    for v in verdicts:
        if v["loose"]:
            deviations[v["entry"]] = max(deviations.get(v["entry"], 0.0), v["loose"])
    if deviations:
        listed = ", ".join(
            f"{name} {size:.1e}" for name, size in sorted(deviations.items(), key=lambda d: -d[1])
        )
        notes.append(f"Loose (largest deviation, relative above 1): {listed}.")
    return Table(f"torch's operator database on {num_devices} device(s)", columns, rows, notes)


def not_passed(verdicts: list[dict[str, Any]]) -> list[str]:
    """One line for each verdict that is not "passed"."""
    return [
        f"{v['entry']} {v['variant']} {v['dtype']}: {v['status']}: {_cell(v['detail'])}"
        for v in verdicts
        if v["status"] != Status.PASSED
    ]


def overloads(verdicts: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The dtypes and names of the entries that passed, for each overload that they used."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"dtypes": set(), "entries": set()})
    for v in verdicts:
        for name in v["lowered"] if v["status"] == Status.PASSED else ():
            seen[name]["dtypes"].add(v["dtype"])
            seen[name]["entries"].add(v["entry"])
    return {
        name: {what: " ".join(sorted(found)) for what, found in seen[name].items()}
        for name in sorted(seen)
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]
