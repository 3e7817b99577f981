"""Did a figure move since the committed results, by more than the noise of the measurement?

Compares result files with a baseline by ratio, so that the two may come from different machines:
times only as a ratio to the peer that took turns with them in the same run, bytes and counts as
they are. The noise is measured too: by the spread of a run's samples (resampled), or where a file
has one sample for each of many figures, by how much these moved against each other.

Without arguments, all files of benchmarks/results that a run has changed are compared with those of
the last commit. Prints what moved. Exit code 1 if a figure is worse, 2 if the files cannot be
compared.

Run: python -m benchmarks.check
     python -m benchmarks.check /tmp/new/fixed_step.json --baseline benchmarks/results
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, Table

_RESAMPLES = 2000
_CERTAINTY = 0.99  # that a figure which did not move is inside of its noise
_FEWEST_SAMPLES = 3
_LEAST_AMOUNT = 0.01  # a smaller change of bytes or counts is another version's rounding up
# Fewer figures that have a single sample do not tell how much such figures scatter.
_FEWEST_FIGURES = 8


class CheckError(ValueError):
    """Files that cannot be compared."""


@dataclass(frozen=True)
class Ratio:
    """Times of ours over those of the peer in the same run, by paths into the result file.

    A path has a key for each level. `*` stands for every key, and `rows[name,size]` for every entry
    of a list, which these of its fields name. A path ends at a number, or at a list of samples.

    Attributes:
        ours: the path.
        theirs: that of the peer; it names the same entries, or has none. Its samples were taken in
            turns with ours.
    """

    ours: str
    theirs: str


@dataclass(frozen=True)
class Amount:
    """Bytes or counts, which no machine changes; less is better."""

    path: str


@dataclass(frozen=True)
class Benchmark:
    """What is compared in a result file, and the settings that must be the same in both."""

    settings: tuple[str, ...]
    figures: tuple[Ratio | Amount, ...]


BENCHMARKS = {
    "attention": Benchmark(
        ("sizes",),
        (
            Ratio("lengths.*.blocks.samples_s", "lengths.*.math.samples_s"),
            Amount("lengths.*.blocks.peak_bytes"),
        ),
    ),
    "context_parallel": Benchmark(
        (),
        (
            Amount("found[length,num_devices].peak_bytes"),
            Amount("found[length,num_devices].sent_bytes"),
        ),
    ),
    "first_trace": Benchmark((), (Amount("num_ops"),)),
    "fixed_step": Benchmark(
        ("shape", "num_devices", "activation_marks"),
        (
            *(
                Ratio(f"ours_s.{name}", f"reference_s.{name}")
                for name in ("wall", "cpu", "burst_wall", "burst_cpu")
            ),
            Amount("num_ops"),
            Amount("compiles"),
            Amount("compiles_after_warm_up"),
        ),
    ),
    "generate": Benchmark((), (Amount("runs[cache,bounded].programs"),)),
    "initialisation": Benchmark(
        (),
        (
            Amount("plans[model,topology].peak_bytes"),
            Amount("run.uploaded_bytes"),
            Ratio("run.model_cpu_samples_s", "run.jax_cpu_samples_s"),
        ),
    ),
    "memory": Benchmark(
        ("num_devices",),
        tuple(Amount(f"step.{name}") for name in ("argument_bytes", "temp_bytes", "peak_bytes")),
    ),
    "op_overhead": Benchmark((), (Ratio("us.*.samples", "floor_samples_us"),)),
    "op_speed": Benchmark((), (Ratio("calls[name,variant].ours", "calls[name,variant].eager"),)),
    "opinfo_1_devices": Benchmark((), (Amount("not_passed"),)),
    "opinfo_8_devices": Benchmark((), (Amount("not_passed"),)),
    "partitioner": Benchmark((), (Amount("failures"),)),
    "partitioner_layouts": Benchmark((), (Amount("calls[call,sizes].wrong"),)),
    "peers": Benchmark(
        (),
        (
            Ratio(
                "results[recipe].ours.cpu_samples_s",
                "results[recipe].theirs.cpu_samples_s",
            ),
        ),
    ),
    "pipeline": Benchmark(
        ("stages",),
        (
            Amount("rows[name,microbatches].bubble_measured"),
            Amount("rows[name,microbatches].flops"),
            Amount("rows[name,microbatches].peak_bytes"),
        ),
    ),
    "rule_bytes": Benchmark((), (Amount("cases.*.ours.bytes"),)),
    "spatial": Benchmark(
        (),
        (
            Ratio("cases.*.after.cpu_ms", "cases.*.before.cpu_ms"),
            Amount("cases.*.after.whole.*"),
        ),
    ),
}


@dataclass(frozen=True)
class Movement:
    """How a figure moved.

    Attributes:
        figure: its path, with the names of its entries.
        before, now: the ratio or amount of the baseline and of the run.
        noise: the change that the measurement's noise alone makes, as a fraction; 0 for an amount,
            None where it is not known: of few single samples, or of a time of 0.
    """

    figure: str
    before: float
    now: float
    noise: float | None

    @property
    def change(self) -> float:
        """By how much more, as a fraction: 0.1 for 10% more."""
        if self.before == 0:
            return 0.0 if self.now == 0 else math.inf
        return self.now / self.before - 1

    def is_beyond(self, least: float) -> bool:
        """Whether it moved by more than its noise, and a ratio by more than `least`."""
        if self.noise is None or abs(self.change) <= (least if self.noise else _LEAST_AMOUNT):
            return False
        return self.change > self.noise or self.change < 1 / (1 + self.noise) - 1


@dataclass(frozen=True)
class Comparison:
    """A result file beside its baseline.

    Attributes:
        name: of the benchmark.
        movements: of all figures in both.
        gone, new: the figures that only the baseline, and only the run has.
        versions: the parts of the environment that differ, as text.
    """

    name: str
    movements: tuple[Movement, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    versions: str


def compare(name: str, run: Mapping[str, Any], baseline: Mapping[str, Any]) -> Comparison:
    """Compares a result file's content with that of its baseline.

    Raises:
        CheckError: the two have different settings, or lack what they should have.
    """
    benchmark = BENCHMARKS[name]
    for setting in benchmark.settings:
        if run.get(setting) != baseline.get(setting):
            raise CheckError(
                f"a run is compared with a baseline of the same settings; got {setting} "
                f"{run.get(setting)} for {name}, and {baseline.get(setting)} in the baseline. "
                "Run the benchmark with the baseline's."
            )
    movements: list[Movement] = []
    gone: list[str] = []
    new: list[str] = []
    for figure in benchmark.figures:
        now = _samples(name, figure, run)
        try:
            before = _samples(name, figure, baseline)
        except CheckError:  # of before the benchmark measured it
            before = {}
        common = [key for key in before if key in now]
        gone += [key for key in before if key not in now]
        new += [key for key in now if key not in before]
        movements += _moved(figure, {key: (before[key], now[key]) for key in common})
    differing = [
        f"{key} {baseline['environment'].get(key)} to {value}"
        for key, value in run["environment"].items()
        if key not in ("date", "commit") and baseline["environment"].get(key, value) != value
    ]
    return Comparison(name, tuple(movements), tuple(gone), tuple(new), ", ".join(differing))


def _samples(name: str, figure: Ratio | Amount, data: Mapping[str, Any]) -> dict[str, list[float]]:
    """The samples of a figure's entries, by their path; of what takes no time, none."""
    try:
        if isinstance(figure, Amount):
            return {path: [_amount(value)] for path, _, value in _found(figure.path, data)}
        theirs = {entry: value for _, entry, value in _found(figure.theirs, data)}
        return {
            path: _ratios(_as_list(value), _as_list(theirs[entry if entry in theirs else ()]))
            for path, entry, value in _found(figure.ours, data)
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        path = figure.path if isinstance(figure, Amount) else f"{figure.ours}, {figure.theirs}"
        raise CheckError(
            f"a result file of {name} has {path}; got one in which that is missing ({error!r}). "
            "Run the benchmark again."
        ) from error


def _amount(value: Any) -> float:
    """An amount as a number; a list of failures counts as their number."""
    return float(len(value) if isinstance(value, list) else value)


def _as_list(value: Any) -> list[float]:
    return [float(v) for v in (value if isinstance(value, list) else [value])]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Of the n-th samples of both: what slows the machine slows both of a pair."""
    if min(*ours, *theirs) <= 0:
        return []
    return [mine / right for mine, right in zip(ours, theirs, strict=True)]


def _found(
    path: str, data: Any, named: tuple[str, ...] = (), entry: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """The values at a path, each with its own path and the names of its entries alone.

    An entry of a list that the benchmark `skipped` has none; entries of one name are numbered.
    """
    if not path:
        yield ".".join(named), entry, data
        return
    key, _, rest = path.partition(".")
    listed = re.fullmatch(r"(\w+)\[([\w,]+)\]", key)
    if key == "*":
        for name, value in data.items():
            yield from _found(rest, value, (*named, name), (*entry, name))
    elif listed is not None:
        seen: Counter[str] = Counter()
        for row in data[listed[1]]:
            if "skipped" not in row:
                name = ", ".join(str(row[field]) for field in listed[2].split(","))
                seen[name] += 1
                name += f", {seen[name]}" * (seen[name] > 1)
                yield from _found(rest, row, (*named, f"{listed[1]}[{name}]"), (*entry, name))
    else:
        yield from _found(rest, data[key], (*named, key), entry)


def _moved(
    figure: Ratio | Amount, entries: Mapping[str, tuple[list[float], list[float]]]
) -> Iterator[Movement]:
    timed = {path: both for path, both in entries.items() if all(both)}
    medians = {path: tuple(map(statistics.median, both)) for path, both in timed.items()}
    scatter = None
    if isinstance(figure, Ratio):
        scatter = _scatter([math.log(now / before) for before, now in medians.values()])
    for path, both in entries.items():
        before, now = medians.get(path, (0.0, 0.0))
        if isinstance(figure, Amount):
            noise: float | None = 0.0
        elif path not in timed:
            noise = None
        else:
            noise = _resampled(*both) if min(map(len, both)) >= _FEWEST_SAMPLES else scatter
        yield Movement(path, before, now, noise)


def _scatter(logs: Sequence[float]) -> float | None:
    """The noise of figures with a single sample: how far their movements scatter.

    As a multiple of the median distance from the median, so that a few figures that really moved
    do not count. 1.4826 of it is a standard deviation of normal noise; timings have longer tails.
    """
    if len(logs) < _FEWEST_FIGURES:
        return None
    middle = statistics.median(logs)
    deviation = 1.4826 * statistics.median(abs(log - middle) for log in logs)
    return math.expm1(4 * deviation)


def _resampled(before: Sequence[float], now: Sequence[float]) -> float:
    """The change of medians between two runs that their samples' spread alone explains (bootstrap).

    Each run's samples are drawn again, with replacement: Efron, "Bootstrap methods: another look at
    the jackknife", 1979.
    """
    random = np.random.default_rng(0)
    drawn = [
        np.log(np.median(random.choice(samples, (_RESAMPLES, len(samples))), axis=-1))
        for samples in (before, now)
    ]
    differences = drawn[1] - drawn[0]
    distances = np.abs(differences - np.median(differences))
    return float(np.expm1(np.quantile(distances, _CERTAINTY)))


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
    """The comparison of each of these files."""
    for path in files:
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
            num_worse += m.change > 0
            verdict = "worse" if m.change > 0 else "better"
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
        "files", nargs="*", type=Path, help="result files of the run (default: benchmarks/results)"
    )
    parser.add_argument(
        "--baseline", type=Path, help="folder of the baseline's results (default: the last commit)"
    )
    parser.add_argument(
        "--least",
        type=float,
        default=0.1,
        help="a smaller change of a time counts as none, as a fraction (default 0.1): two "
        "processes differ by several percent, which the samples of one do not show",
    )
    args = parser.parse_args(arguments)
    try:
        if args.least < 0:
            raise CheckError(
                f"--least is a fraction from 0; got {args.least}. Use 0.1 for 10 percent."
            )
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
