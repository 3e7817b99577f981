"""What is measured and what was: rows, their samples, and `results.json`, which a run resumes from.

`results.json` is one object. It is written anew after each run of a command, so that an
interruption loses nothing:

    version      int: 2; a folder of another version is refused
    rows         list of objects, one for each point of a figure:
      figure     str: "gpt2", "hbm", "resnet", "llama" or "overheads"
      name       str: unique within the figure
      command    list of str: what ran, after `python`; {run} is the folder of one run's files
      settings   object: the point's coordinates, such as preset, mesh and devices
      rounds     int: how often the command is run
      commit     str: of the sources; with a hash of uncommitted changes behind a +
      versions   object: of Python, torch, jax, jaxlib and transformers
      hardware   object: cpu, cores, memory_bytes, accelerator (null without one)
      status     str: "done", "failed" or "unfinished"
      reason     str: why it failed; else empty
      runs       list of objects: started (ISO 8601), seconds, samples by quantity, and probe_s,
                 the seconds of a fixed job before it (null for what is not timed)
      quantities object: by name, unit, median, interval, spread, and samples of all runs

The interval is half the width of the 95% interval that the samples give for their mean, by
Student's t. Rows have few samples; of times and rates, the variance is averaged with a typical one,
the median over all such quantities of the folder, which counts as four samples more (a moderated
variance: Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3). Tables and plots show it: it is of the row
alone.

The spread says how far the median of another run of the whole may lie, with 95% confidence, and
`agree.py` compares by it. The machine's own speed counts there, which moves all rows: twice its
standard deviation over all runs of the folder (`speed.py`), by the root of how many runs the row
has, is added to the interval, as squares. What a compiler computes, such as a program's peak
memory, has an interval and a spread of 0.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.environment import environment
from benchmarks.published import speed

VERSION = 2
FILE = "results.json"
ROOT = Path(__file__).parents[2]

# By the quantity's name, whose last word is the unit: step_s, peak_bytes, tokens_per_s.
Samples: TypeAlias = dict[str, list[float]]


class VersionError(ValueError):
    """A folder has results of another version, or none that can be read."""


class Scale(Enum):
    """How much is measured."""

    QUICK = "quick"
    FULL = "full"


class Device(Enum):
    """What computes: emulated CPU devices, or the GPUs of this machine."""

    EMULATED = "emulated"
    CUDA = "cuda"


@dataclass(frozen=True)
class Settings:
    """What the command line chose.

    Attributes:
        scale: how much is measured.
        device: what computes.
        num_devices: GPUs of this machine, with `Device.CUDA`.
        topology: of TPUs to compile for, such as "v4-16"; empty: none.
    """

    scale: Scale = Scale.QUICK
    device: Device = Device.EMULATED
    num_devices: int = 0
    topology: str = ""


@dataclass(frozen=True, eq=False)
class Row:
    """One point of a figure, before it is measured.

    Attributes:
        figure, name: its place.
        command: arguments of Python. {run} stands for the folder of one run's files, {logs} for
            that of its TensorBoard logs.
        read: the samples of one run, from its folder and the seconds that the command took.
        settings: the point's coordinates.
        rounds: how often the command runs, spread over all runs.
        exit_codes: those of a run that has a result; benchmarks end with 1 where a target is
            missed.
        env: further environment variables.
        is_timed: whether its figures depend on what else the machine does. Others, such as of
            compilations, run beside each other.
        weight: of what is not timed, roughly how long it takes beside the others: the longest
            begin, so that none is left to run alone.
    """

    figure: str
    name: str
    command: Sequence[str]
    read: Callable[[Path, float], Samples]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1
    exit_codes: tuple[int, ...] = (0,)
    env: Mapping[str, str] = field(default_factory=dict)
    is_timed: bool = True
    weight: float = 1.0

    @property
    def slug(self) -> str:
        """The name as part of a path."""
        letters = (c if c.isalnum() or c in ".=" else "-" for c in self.name)
        return "-".join(part for part in "".join(letters).split("-") if part)


@dataclass(frozen=True)
class Place:
    """Where a row was measured; one that was measured elsewhere is measured again."""

    commit: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]


@dataclass(frozen=True)
class Quantity:
    """Median, interval and spread of a row's samples of one quantity.

    Attributes:
        samples: one or more.
        noise: a typical standard deviation of samples in the folder, as a share of the median; 0
            for what does not share it.
        drift: standard deviation of the machine's speed over the runs that the samples are of, as
            a share; 0 for what it does not reach.
        is_measured: False for what a compiler computes, which is the same in each run.
    """

    samples: Sequence[float]
    noise: float = 0.0
    drift: float = 0.0
    is_measured: bool = True

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def is_known(self) -> bool:
        """Whether the spread is known: that of a single ratio is not."""
        return not self.is_measured or bool(self.noise) or len(self.samples) > 1

    @property
    def interval(self) -> float:
        """Half the width of the samples' interval of 95%: see the module."""
        if not self.is_measured:
            return 0.0
        count = len(self.samples)
        squares = (count - 1) * statistics.variance(self.samples) if count > 1 else 0.0
        freedom = count - 1
        if self.noise:
            squares += _PRIOR * (self.noise * self.median) ** 2
            freedom += _PRIOR
        return _student(freedom) * math.sqrt(squares / freedom / count) if freedom else 0.0

    @property
    def spread(self) -> float:
        """How far the median of another run may lie: see the module."""
        if not self.is_measured:
            return 0.0
        return math.hypot(self.interval, 2 * self.drift * self.median)


_PRIOR = 4  # samples that the variance of all quantities counts as


@functools.cache
def _student(freedom: int) -> float:
    """The 97.5th percentile of Student's t for so many degrees of freedom."""
    from scipy import stats  # noqa: PLC0415  (takes a second)

    return float(stats.t.ppf(0.975, freedom))


@dataclass
class Measured:
    """A row with what its runs gave; the fields are those of `results.json`."""

    figure: str
    name: str
    command: list[str]
    settings: dict[str, Any]
    rounds: int
    commit: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    reason: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    # Of the machine, over all rows of the folder: `Store` and `read` know them.
    noise: float = field(default=0.0, compare=False)
    drift: float = field(default=0.0, compare=False)

    @property
    def status(self) -> str:
        """One of done, failed and unfinished."""
        if self.reason:
            return "failed"
        return "done" if len(self.runs) >= self.rounds else "unfinished"

    def quantities(self) -> dict[str, Quantity]:
        """What was measured, over all runs."""
        names = dict.fromkeys(name for run in self.runs for name in run["samples"])
        drift = self.drift / math.sqrt(max(len(self.runs), 1))
        found = {}
        for name in names:
            samples = [s for run in self.runs for s in run["samples"].get(name, ())]
            if is_timed(name):
                found[name] = Quantity(samples, self.noise, drift)
            else:
                found[name] = Quantity(samples, is_measured=name == "ratio")
        return found

    def __getitem__(self, name: str) -> Quantity:
        return self.quantities()[name]

    def median(self, name: str) -> float | None:
        """The median of a quantity; None where no run had it."""
        found = self.quantities().get(name)
        return None if found is None else found.median


def same_shape(row: Measured, other: Measured) -> bool:
    """Whether both come from the same command, run as often."""
    return (row.command, row.rounds) == (other.command, other.rounds)


class Store:
    """The rows of an output folder, in `results.json`.

    Args:
        folder: made if it is missing.
        place: where rows are measured now.

    Raises:
        VersionError: the folder's results have another version or cannot be read.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self.folder, self._place = folder, place
        self._rows = {(row.figure, row.name): row for row in read(folder)}
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, row: Row) -> Measured:
        """What is known of the row: of the same command, commit, versions and hardware.

        A row that failed begins anew.
        """
        new = Measured(
            row.figure,
            row.name,
            list(row.command),
            dict(row.settings),
            row.rounds,
            self._place.commit,
            dict(self._place.versions),
            dict(self._place.hardware),
        )
        known = self._rows.get((row.figure, row.name))
        same = known and not known.reason and dataclasses.replace(known, runs=[]) == new
        return known if known and same else new

    def known(self, row: Row) -> Measured | None:
        """What was measured of the row with the same command, here or elsewhere; None: nothing."""
        found = self._rows.get((row.figure, row.name))
        return found if found and found.command == list(row.command) else None

    def keep(self, row: Measured) -> None:
        """Writes the row, in place of what was known of it."""
        self._rows[row.figure, row.name] = row
        _note_machine(self._rows.values())
        found = {"version": VERSION, "rows": [_object(row) for row in self._rows.values()]}
        # By a rename, so that an interruption leaves the old file or the new one.
        new = self.folder / f"{FILE}.new"
        new.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(new, self.folder / FILE)


def read(folder: Path) -> list[Measured]:
    """The rows of a folder; none if it has no `results.json`.

    Raises:
        VersionError: they have another version or cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        version, rows = found["version"], found["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise VersionError(
            f"an output folder's {FILE} must be one that this command wrote; got {path}, which "
            f"cannot be read ({error!r}). Move it away, or pass another --out."
        ) from error
    if version != VERSION:
        raise VersionError(
            f"an output folder must have results of version {VERSION}; got version {version} in "
            f"{path}. Pass another --out."
        )
    names = {f.name for f in dataclasses.fields(Measured)}
    measured = [Measured(**{k: v for k, v in row.items() if k in names}) for row in rows]
    _note_machine(measured)
    return measured


def _note_machine(measured: Iterable[Measured]) -> None:
    """Tells each row how much times vary on the machine: in the runs of its own commit."""
    rows = list(measured)
    for commit in {row.commit for row in rows}:
        of_commit = [row for row in rows if row.commit == commit]
        probes = [run["probe_s"] for row in of_commit for run in row.runs if run["probe_s"]]
        for row in of_commit:
            row.drift = speed.drift(probes)
            row.noise = _noise(of_commit)


def _noise(rows: Iterable[Measured]) -> float:
    """A typical standard deviation of the samples of a time or rate, as a share of their median."""
    shares = [
        statistics.stdev(quantity.samples) / abs(quantity.median)
        for row in rows
        for name, quantity in row.quantities().items()
        if is_timed(name) and len(quantity.samples) > 1 and quantity.median
    ]
    return statistics.median(shares) if shares else 0.0


def _object(row: Measured) -> dict[str, Any]:
    quantities = {
        name: {
            "unit": unit(name),
            "median": quantity.median,
            "interval": quantity.interval,
            "spread": quantity.spread,
            "samples": list(quantity.samples),
        }
        for name, quantity in row.quantities().items()
    }
    known = {k: v for k, v in dataclasses.asdict(row).items() if k not in ("noise", "drift")}
    return known | {"status": row.status, "quantities": quantities}


def unit(name: str) -> str:
    """The unit of a quantity, from its name.

    Example:
        >>> unit("step_s"), unit("tokens_per_s"), unit("peak_bytes"), unit("images")
        ('s', 'tokens/s', 'bytes', 'images')
    """
    head, _, rate = name.partition("_per_")
    last = head.rpartition("_")[2]
    return f"{last}/{rate}" if rate else last


def is_timed(name: str) -> bool:
    """Whether a quantity is a time or a rate, which the machine's speed decides.

    Example:
        >>> is_timed("step_s"), is_timed("tokens_per_s"), is_timed("ratio"), is_timed("peak_bytes")
        (True, True, False, False)
    """
    return name == "peak_flops" or unit(name).rpartition("/")[2] in ("s", "us")


# --- Where a row is measured ----------------------------------------------------------------------


def place(accelerator: str | None = None) -> Place:
    """This machine, these versions and these sources."""
    found = environment()
    names = ("python", "torch", "jax", "jaxlib", "transformers")
    hardware = {name: found[name] for name in ("cpu", "cores", "memory_bytes")}
    return Place(
        found["commit"],
        {name: found[name] for name in names},
        hardware | {"accelerator": accelerator},
    )
