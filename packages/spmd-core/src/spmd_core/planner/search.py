"""Searches over a script's options: plans each combination, and ranks those that fit.

Each combination is planned in its own process, as a compiler that fails may abort its process.
Finished plans are kept on disk, so that an interrupted search can be resumed.
"""

import hashlib
import importlib.util
import itertools
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_core import files
from spmd_core.errors import PlanError
from spmd_core.planner import sources

_log = logging.getLogger(__name__)

# How often the command's own batch is doubled, at most.
_MAX_DOUBLINGS = 6
# The recipes' names for what is recomputed in backward.
_REMAT = ("none", "attention", "products", "full")
_BATCH, _MESH = "batch", "mesh"
# The value of the recipes' --mesh for which automatic sharding decides, in the plan itself.
_AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """The parts of a search that all combinations share.

    Attributes:
        topology, num_slices: as for `plan`.
        command: the script and its options, without the interpreter.
        folder: the folder for finished plans.
    """

    topology: str
    num_slices: int
    command: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """One planned combination.

    Attributes:
        options: the value of each option.
        plan: the result of `planned.values`; None if planning failed.
        reason: why planning failed; empty if it did not.
    """

    options: Mapping[str, str]
    plan: Mapping[str, Any] | None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether all programs fit the devices' memory; always true for CPUs."""
        return self.plan is not None and self.plan["fits"] is not False

    @property
    def flops_per_s(self) -> float:
        """The model's FLOP/s over all devices in the roofline's time; 0 without a bound."""
        costs = self._step("costs") or {}
        bound = costs.get("bound_s")
        return costs["model_flops"] / bound if bound else 0.0

    @property
    def mfu_bound(self) -> float | None:
        """The roofline's bound on the MFU; None without one."""
        return (self._step("costs") or {}).get("mfu_bound")

    @property
    def peak_bytes(self) -> int | None:
        """The peak on one device; None if it does not fit."""
        return None if self.plan is None else self.plan["peak_bytes"]

    @property
    def shown(self) -> tuple[str, ...]:
        """The values of the options as the table has them: with the mesh that was found."""
        found = "" if self.plan is None else self.plan["found_mesh"]
        return tuple(
            f"{value}: {found}" if (name, value) == (_MESH, _AUTO) and found else value
            for name, value in self.options.items()
        )

    def _step(self, name: str) -> Any:
        step = None if self.plan is None else self.plan["step"]
        return None if step is None else step[name]


def candidates(
    names: Sequence[str], given: Mapping[str, Sequence[str]], request: Request
) -> dict[str, tuple[str, ...]]:
    """The values to try for each option.

    By default, `batch` is the command's own and its doublings, `mesh` is "auto", so that each
    combination is planned with the mesh and the shardings that automatic sharding finds for it, and
    `remat` has the recipes' names. Any other option needs values.

    Args:
        names: the options, without dashes.
        given: values that replace the defaults, by option.

    Raises:
        PlanError: an option has neither values nor defaults, or values are given for an option that
            is not searched.
    """
    unused = set(given) - set(names)
    if unused:
        raise PlanError(
            f"--values are for options of --search; got values for {', '.join(sorted(unused))}. "
            f"Add the name to --search, which has {', '.join(names)}."
        )
    found = {}
    for name in names:
        if name in given:
            found[name] = tuple(given[name])
        elif name == _BATCH:
            own = option(request.command, _BATCH)
            if own is None or not own.isdigit() or int(own) < 1:
                raise PlanError(
                    "the search over batch doubles the command's own batch; got "
                    f"{own!r}. Add for instance --batch 8 to the command, or "
                    "--values 'batch=8;16;32'."
                )
            found[name] = tuple(str(int(own) << i) for i in range(_MAX_DOUBLINGS + 1))
        elif name == _MESH:
            found[name] = (_AUTO,)
        elif name == "remat":
            found[name] = _REMAT
        else:
            raise PlanError(
                "an option of the search needs values; only batch, mesh and remat have defaults, "
                f"and got {name!r}. Add --values '{name}=VALUE;VALUE'."
            )
    return found


def search(
    values: Mapping[str, Sequence[str]],
    request: Request,
    *,
    report: Callable[[int, int, Outcome], None],
) -> list[Outcome]:
    """Plans every combination; batches only up to the first that does not fit.

    Args:
        values: the values of each option.
        request: what all combinations share.
        report: called after each combination with its number, the number of all, and the outcome.

    Returns:
        The outcomes, ranked: those that fit first, by the roofline's rate, then by memory.
    """
    # The batch varies fastest, so that larger batches are skipped after the first that does not
    # fit.
    names = sorted(values, key=lambda name: name == _BATCH)
    combinations = [
        dict(zip(names, chosen)) for chosen in itertools.product(*(values[n] for n in names))
    ]
    outcomes: list[Outcome] = []
    full: set[tuple[str, ...]] = set()
    digest = sources.digest(_sources(request.command))
    for i, options in enumerate(combinations, 1):
        row = tuple(options[n] for n in names if n != _BATCH)
        if _BATCH in values and row in full:
            outcome = Outcome(options, None, "not planned: a smaller batch does not fit")
        else:
            outcome = _planned(options, request, digest)
            if outcome.plan is not None and not outcome.fits:
                full.add(row)
        outcomes.append(outcome)
        report(i, len(combinations), outcome)
    return sorted(
        outcomes,
        key=lambda o: (
            not o.fits,
            -o.flops_per_s,
            o.peak_bytes if o.peak_bytes is not None else float("inf"),
        ),
    )


def _planned(options: Mapping[str, str], request: Request, digest: str) -> Outcome:
    """The plan of one combination, from disk or by a new process."""
    command = request.command
    for name, value in options.items():
        command = with_option(command, name, value)
    key = hashlib.sha256(
        json.dumps([digest, request.topology, request.num_slices, command]).encode()
    ).hexdigest()[:24]
    path = request.folder / f"{key}.json"
    kept = _kept(path)
    if kept is not None:
        return Outcome(options, kept)
    request.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "plan.json"
        words = [sys.executable, "-m", "spmd_core.plan", "--topology", request.topology]
        words += ["--slices", str(request.num_slices), "--json", str(made), "--", *command]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not made.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            return Outcome(options, None, f"exit code {done.returncode}: {lines[-1]}")
        plan = json.loads(made.read_text())
    files.write_text(path, json.dumps({"plan": plan, "sha256": _sha256(plan)}, indent=1) + "\n")
    return Outcome(options, plan)


def _kept(path: Path) -> dict[str, Any] | None:
    """A plan that an earlier search has written; None if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
        plan: dict[str, Any] = found["plan"]
        if found["sha256"] == _sha256(plan):
            return plan
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError):
        pass
    _log.warning("%s is damaged, so its plan is made again", path)
    return None


def _sha256(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def option(command: Sequence[str], name: str) -> str | None:
    """The value of `--name` in a command line; None if it is not given."""
    for i, word in enumerate(command):
        if word == f"--{name}" and i + 1 < len(command):
            return command[i + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def with_option(command: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    """The command line with another value for `--name`.

    Example:
        >>> with_option(("-m", "train", "--batch", "8", "--smoke"), "batch", "16")
        ('-m', 'train', '--smoke', '--batch', '16')
    """
    kept, words = [], iter(command)
    for word in words:
        if word == f"--{name}":
            next(words, None)
        elif not word.startswith(f"--{name}="):
            kept.append(word)
    return (*kept, f"--{name}", value)


def _sources(command: Sequence[str]) -> Iterator[Path]:
    """The sources of the script."""
    script = Path(command[0])
    if command[0] == "-m" and len(command) > 1:
        found = importlib.util.find_spec(command[1].partition(".")[0])
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            yield from sorted(Path(folder).rglob("*.py"))
    elif script.is_file():
        yield from sorted(script.resolve().parent.glob("*.py"))


def table(outcomes: Sequence[Outcome]) -> str:
    """The ranking as text: options, fit, peak memory, and the roofline's bounds, *modelled*."""
    names = list(outcomes[0].options) if outcomes else []
    rows = [(*names, "peak of a device", "MFU at most", "TFLOP/s at most", "")]
    for o in outcomes:
        peak = "-" if o.peak_bytes is None else f"{o.peak_bytes / 1e9:,.2f} GB"
        mfu = "-" if o.mfu_bound is None else f"{o.mfu_bound:.1%}"
        rate = f"{o.flops_per_s / 1e12:,.0f}" if o.flops_per_s else "-"
        note = o.reason or ("" if o.fits else "does not fit")
        rows.append((*o.shown, peak, mfu, rate, note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
