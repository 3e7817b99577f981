"""Saves a run to a folder of checkpoints and goes on from it: in the same state, at the same data.

Everything by `spmd.CheckpointManager`; here is what a recipe adds: whose folder it is, by the run's
options and data, and errors that name options. What lies in a folder:

    run.json    the options that decide what is computed, and the data: of the run's first start
    <step>/     the model, the optimizer, the scheduler, the place in the data in samples, torch's
                random state, and the run's options
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import spmd_core as spmd
from examples.training.choices import RESUME_AUTO
from examples.training.knobs import UsageError, option
from examples.training.run_config import RunConfig
from spmd_core import files
from spmd_core.errors import CheckpointError, SpmdError


class ResumeError(UsageError):
    """A folder is that of a run with other options or other data, or a step cannot be taken."""


class SaveError(OSError):
    """A run could not be written."""


class Stateful(Protocol):
    """Has a state that is saved and loaded: a model, an optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


# --- Before the training --------------------------------------------------------------------------


def check_writable(config: RunConfig, places: Mapping[str, str] | None = None) -> None:
    """Tries to write a run's files, so that a wrong path fails before the training and not after.

    Args:
        config: names the folder of --checkpoint, and the file of --results.
        places: further files, by the option that names each or its folder; an empty one is left
            out.

    Raises:
        SaveError: a file, or its folder, cannot be made.
    """
    if spmd.debugging.is_planning() or not spmd.distributed.is_master():
        return
    a_file = str(Path(config.checkpoint) / "tried") if config.checkpoint else ""
    known = {"--checkpoint": (config.checkpoint, a_file), "--results": (config.results,) * 2}
    known |= {name: (place, place) for name, place in (places or {}).items()}
    for name, (place, path) in known.items():
        if place:
            try:
                files.check_writable(path)
            except OSError as error:
                raise SaveError(
                    f"{name} must name what can be written; got {place!r}: {error}. Name another "
                    "place."
                ) from error


def step_of(config: RunConfig) -> int | None:
    """The step that a run goes on from, after checking that its folder is that of such a run.

    Needs no device, so that a wrong folder fails within seconds.

    Args:
        config: the run's options; `resume` is a step, or `RESUME_AUTO` for the newest one.

    Returns:
        None for a new run: without --checkpoint, where the folder has no step yet, and in a plan,
        which reads nothing.

    Raises:
        ResumeError: an option differs that decides what is computed; the folder does not have the
            step; or the run has done more steps than it is to have.
    """
    if not config.checkpoint or spmd.debugging.is_planning():
        return None
    from spmd_core.checkpoint import folder as steps  # noqa: PLC0415 - an optional package

    folder = Path(config.checkpoint).expanduser()
    before = _options_of(folder)
    there = steps.whole_steps(folder)
    # A run that was saved before an option existed had the option's default.
    known, now = _identity(type(config)()) | (before or {}), _identity(config)
    for name, value in now.items():
        if before is not None and known[name] != value:
            raise ResumeError(
                f"a run resumes with the options that it began with; got {option(name)} {value}, "
                f"and {known[name]} in {str(folder)!r}. Pass {option(name)} {known[name]}, or "
                "begin a new run in another folder."
            )
    step = max(there, default=None) if config.resume == RESUME_AUTO else int(config.resume)
    if step is not None and step not in there:
        raise ResumeError(
            f"--resume names a step that is saved, or {RESUME_AUTO}; got {step}, and the steps in "
            f"{str(folder)!r} are {steps.listed(folder)}. Name one of these."
        )
    if step is not None and config.steps < step:
        raise ResumeError(
            f"--steps counts all steps of a run; got {config.steps}, and the one in "
            f"{str(folder)!r} has done {step}. Pass for instance --steps {2 * step}, or begin a "
            "new run in another folder."
        )
    return step


def _options_of(folder: Path) -> dict[str, Any] | None:
    """The identity of the run that a folder belongs to; None without one."""
    from spmd_core.checkpoint import folder as steps  # noqa: PLC0415 - an optional package

    try:
        return steps.identity_of(folder)
    except CheckpointError as error:
        raise ResumeError(str(error)) from error


def _identity(config: RunConfig) -> dict[str, Any]:
    """The options that decide what is computed; those of a resumed run are equal."""
    values = _plain(config)
    return {
        field.name: values[field.name]
        for field in dataclasses.fields(config)
        if not field.metadata["resumable"]
    }


def _plain(config: RunConfig) -> dict[str, Any]:
    """The options as JSON has them: tuples become lists."""
    values = dataclasses.asdict(config)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


# --- In the training ------------------------------------------------------------------------------


class Saves:
    """The saved steps of a run; without --checkpoint, and in a plan, nothing is saved.

    A context manager, which gives the folder up at its end. Under several processes, each must make
    the same calls.

    Args:
        config: the run's options.
        data: identifies the data, such as a hash of it.
        parts: what the run goes on with, by name.

    Raises:
        ResumeError: the folder has a run of other data, or another live run writes into it.
        SaveError: the folder cannot be written.
    """

    def __init__(self, config: RunConfig, *, data: str, parts: Mapping[str, Stateful]) -> None:
        self._config, self._parts = config, parts
        self._manager: Any = None
        if not config.checkpoint or spmd.debugging.is_planning():
            return
        before = _options_of(Path(config.checkpoint).expanduser())
        try:
            self._manager = spmd.CheckpointManager(
                config.checkpoint,
                every=config.save_every or config.steps,
                keep=config.keep or None,
                identity=(_identity(config) if before is None else before) | {"data": data},
            )
        except CheckpointError as error:
            raise ResumeError(f"--checkpoint {config.checkpoint}: {error}") from error
        except (OSError, SpmdError) as error:
            raise SaveError(f"--checkpoint {config.checkpoint}: {error}") from error

    def restore(self, step: int | None) -> str:
        """Gives the parts, and torch's random generator, the state of a saved step; or of none.

        Tensors keep their devices and shardings, whatever those of the saved run were. The next
        step has the learning rate that the schedule of this run has there: with another --steps
        than the saved run's, it may be another one than that run would have taken.

        Args:
            step: what `step_of` gave. A step that --resume names has those after it removed.

        Returns:
            A line about where the run begins; empty without --checkpoint.

        Raises:
            ResumeError: the state is damaged, or does not fit the parts. Nothing has changed then,
                unless only a part's own `load_state_dict` noticed.
        """
        if self._manager is None:
            return ""
        config = self._config
        if step is None:
            return f"resume from no step: {config.checkpoint} has none yet, and a new run begins"
        try:
            done = self._manager.restore({**self._parts, "config": None}, step)
            if config.resume != RESUME_AUTO:
                self._manager.remove_after(step)
        # The errors of the manager, and those that parts raise for a state that they cannot load.
        except (OSError, SpmdError, ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"the run in {config.checkpoint!r} cannot go on from step {step}: {error}"
            message += self._advice(step)
            self.__exit__(type(error), error, None)
            raise ResumeError(message) from error
        saved_rate = self._parts["scheduler"]._last_lr[0]  # type: ignore[attr-defined]
        rate = _take_rates(self._parts["scheduler"])
        line = f"resume after step {step} of {config.steps}"
        before = done.state["config"]["steps"]
        if before != config.steps:
            line += (
                f"; the saved run had {before} steps, and the learning rate decays over all: "
                f"{rate:.2e} in the next one, in place of {saved_rate:.2e}"
            )
        return line

    def _advice(self, step: int) -> str:
        earlier = [number for number in self._manager.all_steps() if number < step]
        if not earlier:
            return " To begin anew, name another folder."
        return (
            f" Pass --resume {earlier[-1]} to go on from the step before, which removes the later "
            "ones; or name another folder."
        )

    def save_if_due(self, step: int) -> str:
        """Saves every --save-every steps; returns a line that says so, else nothing."""
        due = self._manager is not None and self._config.save_every
        return self.save(step) if due and self._manager.should_save(step) else ""

    def save(self, step: int) -> str:
        """Saves the state behind the run. Waits for the devices, and for the save before.

        Returns:
            A line that says so; empty without --checkpoint.

        Raises:
            SaveError: the save before failed, and nothing was saved now; or the folder cannot be
                written. Earlier steps are as they were.
        """
        if self._manager is None:
            return ""
        try:
            self._manager.save(step, {**self._parts, "config": _plain(self._config)})
        except (OSError, SpmdError) as error:
            raise SaveError(str(error)) from error
        return f"step {step:5d}  saved to {self._config.checkpoint}"

    def wait(self) -> None:
        """Waits until what was saved is whole on the disk.

        Raises:
            SaveError: it could not be written. Earlier steps are as they were.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait()
        except (OSError, SpmdError) as error:
            raise SaveError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._manager is not None:
            self._manager.__exit__(kind, error, trace)


def _take_rates(scheduler: Any) -> float:
    """Sets the learning rates of the next step, as the schedule does after each step.

    The saved rates are those of the saved run's --steps.
    """
    rates = [
        base * factor(scheduler.last_epoch)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = rates
    return float(rates[0])
