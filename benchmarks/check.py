"""Did a figure move since the committed results, by more than the noise of the measurement?

Compares results with a baseline by ratio, so that the two may come from different machines: times
only as a ratio to a peer of the same run (`compared.py`), or for a folder of `scripts/bench.sh`, to
a fixed job that took turns with it (`published/compared.py`); bytes and counts as they are. The
noise is measured too (`movements.py`).

Without arguments, all files of benchmarks/results that a run has changed are compared with those of
the last commit. Prints what moved. Exit code 1 if a figure is worse, 2 if the files cannot be
compared.

Run: python -m benchmarks.check
     python -m benchmarks.check /tmp/new/fixed_step.json --baseline benchmarks/results
     python -m benchmarks.check results/2026-01-31-x86-64-2-cores
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compared import BENCHMARKS, compare
from benchmarks.movements import CheckError, Comparison
from benchmarks.options import number
from benchmarks.published import compared as published
from benchmarks.report import RESULTS, Table

QUICK_RUN = RESULTS / "quick"  # of scripts/bench.sh


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        CheckError: there is none, or it is broken.
    """
    try:
        return _parsed(path.read_text(), str(path))
    except OSError as error:
        raise CheckError(
            f"a result file must exist to be compared; got {path} ({error.strerror}). "
            "Run its benchmark, or name another file."
        ) from error


def committed(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The result file of the last commit; None if it has none.

    Raises:
        CheckError: the folder is in no git repository, or the file is broken.
    """
    spec = f"HEAD:./{name}.json"
    done = subprocess.run(
        ["git", "-C", str(folder), "show", spec], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return _parsed(done.stdout, spec)
    if "not a git repository" in done.stderr:
        raise CheckError(
            f"the baseline is the last commit's; got {folder}, which is in no git repository. "
            "Name a folder of results by --baseline."
        )
    return None


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckError(
            f"a result file is JSON; got {what}, which is broken ({error}). "
            "Run its benchmark again."
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("environment"), dict):
        raise CheckError(
            f"a result file has an `environment`; got {what} without. "
            "Name files that a benchmark has written."
        )
    return data


def _named(files: Sequence[Path], baseline: Path | None) -> Iterator[Comparison]:
    """The comparison of each of these files, or folders of `scripts/bench.sh`."""
    for path in files:
        if path.is_dir():
            yield published.compare(path, baseline or QUICK_RUN)
            continue
        name = path.stem
        if name not in BENCHMARKS:
            raise CheckError(
                f"the benchmarks that are compared are {', '.join(BENCHMARKS)}; got {path}. "
                "Name a result file of one of them."
            )
        run = read(path)
        before = committed(name) if baseline is None else read(baseline / path.name)
        if before is None:
            raise CheckError(
                f"a run is compared with a baseline; got none for {name} in the last commit. "
                "Commit one, or name a folder of results by --baseline."
            )
        yield compare(name, run, before)


def _changed(folder: Path, baseline: Path | None) -> Iterator[Comparison]:
    """The comparison of each file of a folder that both places have and that a run changed."""
    for path in sorted(path for path in folder.glob("*.json") if path.stem in BENCHMARKS):
        run, there = read(path), None if baseline is None else baseline / path.name
        if there is None:
            before = committed(path.stem, folder)
        else:
            before = read(there) if there.exists() else None
        if before is not None and before != run:
            yield compare(path.stem, run, before)


def _percent(fraction: float | None) -> str:
    if fraction is None:
        return "not known"
    return "from 0" if math.isinf(fraction) else f"{fraction:+.1%}"


def report(comparisons: Sequence[Comparison], *, least: float) -> tuple[Table, int]:
    """The table of what moved, and the number of figures that are worse."""
    rows: list[list[str]] = []
    notes: list[str] = []
    num_worse = 0
    for c in comparisons:
        moved = [m for m in c.movements if m.is_beyond(least)]
        for m in sorted(moved, key=lambda m: -abs(m.change)):
            num_worse += m.is_worse
            verdict = "worse" if m.is_worse else "better"
            noise = "exact" if not m.noise else f"{1 / (1 + m.noise) - 1:.1%} {m.noise:+.1%}"
            cells = (f"{c.name}: {m.figure}", f"{m.before:.4g}", f"{m.now:.4g}")
            rows.append([*cells, _percent(m.change), noise, verdict])
        noises = [m.noise for m in c.movements if m.noise]
        typical = f", typical noise {statistics.median(noises):.1%}" if noises else ""
        notes.append(f"{c.name}: {len(c.movements)} figures, {len(moved)} moved{typical}.")
        unknown = [m.figure for m in c.movements if m.noise is None]
        for what, figures in (
            ("not judged, by a single sample or a time of 0", unknown),
            ("only in the baseline", c.gone),
            ("only in the run", c.new),
        ):
            if figures:
                more = f" and {len(figures) - 3} more" if len(figures) > 3 else ""
                notes.append(f"{c.name}: {what}: {', '.join(figures[:3])}{more}.")
        if c.versions:
            notes.append(f"{c.name}: other versions: {c.versions}.")
    columns = ["figure", "baseline", "run", "change", "noise", ""]
    title = "What moved by more than its noise" if rows else "Nothing moved by more than its noise"
    return Table(title, columns, rows, notes), num_worse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="result files of the run, or the folder of one of scripts/bench.sh (default: "
        "benchmarks/results)",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        help="folder of the baseline's results (default: the last commit; of scripts/bench.sh, "
        "benchmarks/results/quick)",
    )
    parser.add_argument(
        "--least",
        type=number(),
        default=0.1,
        help="a smaller change of a time counts as none, as a fraction (default 0.1): two "
        "processes differ by several percent, which the samples of one do not show",
    )
    args = parser.parse_args(arguments)
    try:
        comparisons = list(
            _named(args.files, args.baseline) if args.files else _changed(RESULTS, args.baseline)
        )
        if not comparisons:
            raise CheckError(
                f"a run differs from its baseline; got no file in {RESULTS} that does. "
                "Run a benchmark first, or name its result file."
            )
        table, num_worse = report(comparisons, least=args.least)
    except CheckError as error:
        print(f"benchmarks.check: {error}", file=sys.stderr)
        return 2
    table.show()
    return 1 if num_worse else 0


if __name__ == "__main__":
    sys.exit(main())
