"""Saves a run to a file and goes on from it: in the same state, at the same place in the data."""

import dataclasses
import errno
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

import spmd_core as spmd
from examples.training.choices import RESUME_AUTO
from examples.training.knobs import UsageError, option
from examples.training.run_config import RunConfig
from examples.training.saved_state import StateError, check_parts, check_run
from spmd_core import files

_FORMAT = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ResumeError(UsageError):
    """A file is no saved run, or it is one of a run with other options or other data."""


class SaveError(OSError):
    """A run could not be written."""


class Stateful(Protocol):
    """Has a state that is saved and loaded: a model, an optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def check_writable(config: RunConfig, places: Mapping[str, str] | None = None) -> None:
    """Tries to write a run's files, so that a wrong path fails before the training and not after.

    Args:
        config: names the files of --checkpoint, in which `{step}` stands for a number, and
            --results.
        places: further files, by the option that names each or its folder; an empty one is left
            out.

    Raises:
        SaveError: a file, or its folder, cannot be made.
    """
    known = {"--checkpoint": config.checkpoint, "--results": config.results}
    for name, place in (known | dict(places or {})).items():
        path = place.replace("{step}", "0")
        if path and not spmd.debugging.is_planning() and spmd.distributed.is_master():
            try:
                files.check_writable(path)
            except OSError as error:
                raise SaveError(
                    f"{name} must name what can be written; got {path!r}: {error}. Name another "
                    "place."
                ) from error


def save(
    path: str | Path,
    *,
    step: int,
    config: RunConfig,
    data: str,
    parts: Mapping[str, Stateful],
) -> None:
    """Writes a run's state. Waits for the device; under several processes, each must call it.

    The file replaces an earlier one when it is complete, so one can always be resumed.
    It holds unsharded tensors, whatever the mesh, and `torch.load(path, weights_only=True)` reads
    it.

    Args:
        path: a file; its folder is made.
        step: the number of steps done, which is the place in the data.
        config: the run's options.
        data: identifies the data, such as a hash of it.
        parts: what the run goes on with, by name.

    Raises:
        SaveError: the file could not be written, for instance as the disk is full, or the path is
            no regular file's. An earlier file is as it was.
    """
    path = Path(path).expanduser()
    state = spmd.to_cpu(
        {
            "format": _FORMAT,
            "step": step,
            "config": _plain(config),
            "data": data,
            "random": torch.get_rng_state(),
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spmd.save(state, path)
    # torch's writer raises a RuntimeError where it cannot write.
    except (OSError, RuntimeError) as error:
        is_full = not isinstance(error, OSError) or error.errno in _FULL
        rule = "fit on the disk" if is_full else "be written to a file"
        kept = "The file of an earlier step is kept. " if path.is_file() else ""
        what = "Free space, or name" if is_full else "Name"
        raise SaveError(
            f"the state after step {step} must {rule}; {path} could not be written: {error}. "
            f"{kept}{what} another file."
        ) from error


def read(config: RunConfig) -> dict[str, Any] | None:
    """The saved run, for `restore`, after checking that its options are those of `config`.

    Needs no device, so that a wrong file fails within seconds.

    Args:
        config: the run's options; `resume` names the file, or is `RESUME_AUTO`.

    Returns:
        The saved run; None for a new one: nothing is to be resumed, or `RESUME_AUTO` finds no file
        yet.

    Raises:
        ResumeError: the file is missing or is no saved run, an option differs that decides what is
            computed, or the run has done more steps than it is to have.
        KnobError: see `RunConfig.check_resumable`.
    """
    if not config.resume:
        return None
    path = Path(config.resume).expanduser()
    if config.resume == RESUME_AUTO:
        found_path = newest(config.checkpoint)
        if found_path is None:
            return None
        path = found_path
    saved = _loaded(path)
    if not isinstance(saved, dict) or "format" not in saved:
        raise _no_run(path, "it lacks the entry 'format'")
    if saved["format"] != _FORMAT:
        raise ResumeError(
            f"--resume reads files of format {_FORMAT}; got format {saved['format']} in "
            f"{str(path)!r}. Resume with the release that wrote it."
        )
    try:
        check_run(saved)
    except StateError as error:
        raise _no_run(path, str(error)) from error
    # A run that was saved before an option existed had the option's default.
    before, now = _plain(type(config)()) | saved["config"], _plain(config)
    for field in dataclasses.fields(config):
        name = field.name
        if not field.metadata["resumable"] and before[name] != now[name]:
            raise ResumeError(
                f"a run resumes with the options that it began with; got {option(name)} "
                f"{now[name]}, and {before[name]} in {str(path)!r}. Pass {option(name)} "
                f"{before[name]}, or begin a new run without --resume."
            )
    if config.steps < saved["step"]:
        raise ResumeError(
            f"--steps counts all steps of a run; got {config.steps}, and {str(path)!r} has done "
            f"{saved['step']}. Pass for instance --steps {2 * saved['step']}, or begin a new run "
            "without --resume."
        )
    config.check_resumable(before)
    return saved


def newest(checkpoint: str) -> Path | None:
    """The file that --checkpoint has written; of those with `{step}`, that of the last step.

    Returns:
        None if there is none yet.
    """
    path = Path(checkpoint).expanduser()
    before, has_steps, after = path.name.partition("{step}")
    if not has_steps:
        return path if path.exists() else None
    pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    found = [(int(named[1]), file) for file in there if (named := pattern.fullmatch(file.name))]
    return max(found)[1] if found else None


def _loaded(path: Path) -> Any:
    """The content of a file, after comparing each of its parts with its checksum.

    torch writes the checksums, and does not read them.

    Raises:
        ResumeError: the file is missing, damaged, or none of torch's.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as parts:
            damaged = parts.testzip()
    # What a damaged directory of a zip file raises is not documented.
    except Exception as error:
        raise _no_run(path, _first_line(error)) from error
    if damaged is not None:
        raise _no_run(path, f"its part {damaged!r} is damaged")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # neither is what torch raises for one
        raise _no_run(path, _first_line(error)) from error


def _no_run(path: Path, why: str) -> ResumeError:
    return ResumeError(
        f"--resume needs the file of a saved run; {str(path)!r} is none: {why}. "
        "Name the file that the run wrote, or leave out --resume. "
        f"--resume {RESUME_AUTO} begins a run that has saved nothing yet."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def restore(saved: Mapping[str, Any], *, data: str, parts: Mapping[str, Stateful]) -> int:
    """Gives `parts` and torch's random generator the saved state; returns the saved step.

    Tensors keep their devices and shardings, whatever those of the saved run were. The next step
    has the learning rate that the schedule of this run has there: with another --steps than the
    saved run's, it may be another one than that run would have taken.

    Raises:
        ResumeError: the run was of other data, or an entry of a part is missing or not as it must
            be. Nothing has changed then, unless only a part's own `load_state_dict` noticed.
    """
    if saved["data"] != data:
        raise ResumeError(
            "a run resumes with the data that it began with; got other data under the same name "
            f"({data} now, {saved['data']} then). Restore the data, or begin a new run without "
            "--resume."
        )
    try:
        check_parts(saved, parts)
        for name, part in parts.items():
            try:
                part.load_state_dict(saved["parts"][name])
            # The errors that parts raise for a state that they cannot load.
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise StateError(f"parts.{name} cannot be taken: {_first_line(error)}") from error
    except StateError as error:
        raise ResumeError(
            f"a run resumes with the state that it saved; the file's is another: {error}. Name "
            "the file that the run wrote, or leave out --resume."
        ) from error
    torch.set_rng_state(saved["random"])
    # As the schedule does after each step: the saved rates are those of the saved run's --steps.
    scheduler: Any = parts["scheduler"]
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = rates
    return int(saved["step"])


def said(config: RunConfig, saved: Mapping[str, Any] | None, *, lr: float) -> str:
    """A line about where the run begins.

    Args:
        config: the run's options.
        saved: what `read` gave.
        lr: the learning rate of the next step.
    """
    if saved is None:
        return f"resume from no file: {config.checkpoint} is not there yet, and a new run begins"
    line = f"resume after step {saved['step']} of {config.steps}"
    before = saved["config"].get("steps", config.steps)
    if before != config.steps:
        rates = saved["parts"]["scheduler"]["_last_lr"]
        line += (
            f"; the saved run had {before} steps, and the learning rate decays over all: "
            f"{lr:.2e} in the next one, in place of {rates[0]:.2e}"
        )
    return line


def _plain(config: RunConfig) -> dict[str, Any]:
    """The options as a dict that a file of tensors may hold: tuples become lists."""
    values = dataclasses.asdict(config)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
