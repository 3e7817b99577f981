"""The record of a run: its log, figures, saved states, orderly end and report.

At its beginning it gives the parts of a resumed run their saved state. Then it takes figures, and
never touches a model or an optimizer: the loop is the recipe's.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, islice, repeat
from typing import Any, Protocol, Self

import torch

import spmd_core as spmd
from examples.training import resume
from examples.training.collector import long_lived
from examples.training.log import Report, RunLog
from examples.training.meter import Meter
from examples.training.resume import SaveError, Stateful
from examples.training.run_config import RunConfig
from examples.training.timing import StopOnInterrupt
from spmd_core.metrics import device_kind, device_peak

# Losses are read this many steps late, so that the device never waits for Python to send the next
# step.
READ_LAG = 2


class Data(Protocol):
    """What a model is trained on.

    Attributes:
        identity: differs for other data; saved with the run.
        summary: one line for the console.
    """

    @property
    def identity(self) -> str: ...

    @property
    def summary(self) -> str: ...


class Journal:
    """A run's record. The training loop runs inside of its `with` block, and reports each step:

        with journal, batches:
            for step, batch in journal.steps(batches):
                ...
                journal.add(step, loss, grad_norm, lr)
                if journal.evaluates_after(step):
                    journal.evaluated(step, loss=evaluate(model))
                journal.save_if_due(step)
                if journal.ends_after(step):
                    break
            report = journal.finish()

    Inside the block, Ctrl-C and SIGTERM end the run after a step, and the garbage collector does
    not examine objects that were alive before.

    Args:
        config: the run's options.
        saved: what `resume.read` gave; None for a new run.
        device, mesh: where the model is.
        model: its name.
        num_params: of the model, padding included.
        items_per_step: items in a batch, over all devices.
        unit: what an item is, in the plural, such as "tokens" or "images".
        flops_per_item: forward and backward FLOPs for one item, by formula.
        data: what the model is trained on.
        parts: what is saved, and what a resumed run goes on with, by name: the model, the optimizer
            and the scheduler, and what else has a state.

    Attributes:
        log: where its lines go; the recipe may write more.
        report: the figures so far.

    Raises:
        ResumeError: the saved run has other data or other parts.
    """

    def __init__(
        self,
        config: RunConfig,
        saved: Mapping[str, Any] | None,
        *,
        device: torch.device,
        mesh: spmd.Mesh | None,
        model: str,
        num_params: int,
        items_per_step: int,
        unit: str,
        flops_per_item: Mapping[str, float],
        data: Data,
        parts: Mapping[str, Stateful],
    ) -> None:
        first = resume.restore(saved, data=data.identity, parts=parts) if saved else 0
        self._config, self._first = config, first
        self._data, self._parts = data.identity, parts
        self._on_xla = config.device == "xla"
        self._last_step = first
        self._stack = ExitStack()
        axes = {str(name): size for name, size in mesh.shape().items()} if mesh else {}
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        peak = device_peak(device, mesh, dtype=dtype)
        self.report = Report(
            config=dataclasses.asdict(config),
            num_params=num_params,
            num_devices=mesh.size() if mesh else 1,
            device_kind=device_kind(device),
            mesh=axes,
            resumed_at=first,
            peak_flops=peak.flops_per_s,
            peak_source=peak.source,
        )
        self.log = RunLog(
            log_dir=config.log_dir,
            num_steps=config.steps,
            first_step=first,
            shows_progress=config.progress,
        )
        self.log.settings(self.report.config)
        if mesh:
            self.log.mesh(mesh)
        where = f"{self.report.num_devices} {config.device} device(s) {axes or ''}".rstrip()
        self.log.say(f"data   {data.summary}")
        self.log.say(f"model  {model}, {num_params:,} parameters, on {where}")
        if config.resume:
            scheduler: Any = parts["scheduler"]
            self.log.say(resume.said(config, saved, lr=scheduler.get_last_lr()[0]))
        self._meter = Meter(
            self.report,
            items_per_step=items_per_step,
            unit=unit,
            flops_per_item=flops_per_item,
            run_log=self.log,
            log_every=config.log_every,
            lag=READ_LAG if self._on_xla else 0,
            on_xla=self._on_xla,
        )

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(self.log.close)
            self._interrupt = stack.enter_context(StopOnInterrupt())
            stack.enter_context(long_lived())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def steps(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The number and the batch of each step that is left; of as many epochs as that takes.

        On the XLA device, `MpDeviceLoader` sends a step to the device before it gives the next
        batch. A finished run that is resumed has no step.
        """
        left = islice(chain.from_iterable(repeat(batches)), self._config.steps - self._first)
        return enumerate(left, start=self._first + 1)

    def add(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Keeps the scalars of one step, and logs those of an earlier one.

        It waits for the device only if an evaluation is due: the step ends here then, as the
        evaluation is a program of its own.
        """
        self._last_step = step
        self._meter.add(step, loss, grad_norm, lr)
        if self.evaluates_after(step):
            self._sync()
            self._meter.read(up_to=step)
        else:
            self._meter.read_due()

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation is due: every --eval-every steps, and after the last one."""
        every, number = self._config.eval_every, self._config.eval_batches
        is_due = step == self._config.steps or (every and step % every == 0)
        return bool(number and is_due)

    def evaluated(self, step: int, **figures: float) -> None:
        """Logs an evaluation's figures, such as `loss`; its duration counts for no step."""
        self._meter.evaluated(step, **figures)

    def save_if_due(self, step: int) -> None:
        """Saves the run every --save-every steps. One that fails does not end it."""
        every = self._config.save_every
        if every and step % every == 0 and step < self._config.steps:
            try:
                self._save(step)
            except SaveError as error:  # the disk may have space by the next save
                self.log.say(f"error: {error} The run goes on.")

    def ends_after(self, step: int) -> bool:
        """Whether Ctrl-C or SIGTERM ends the run here; every process of it asks after each step."""
        if self._interrupt.ends_run():
            self.log.say(f"interrupted: ending after step {step} of {self._config.steps}")
        return self._interrupt.has_ended_run

    def finish(self) -> Report:
        """Reads what is not read yet, saves the run, and writes the report. Waits for the device.

        In a plan, which has no values, it ends the last step and writes nothing.

        Raises:
            SaveError: the run could not be saved.
        """
        self._sync()
        if spmd.is_planning():
            return self.report
        self._meter.read(up_to=self._config.steps)
        if self._config.checkpoint and self._first < self._config.steps:
            self._save(self._last_step)
        wall_s = time.perf_counter() - self._start_s
        report = self._meter.finished(wall_s=wall_s, interrupted=self._interrupt.has_ended_run)
        self.log.finish(report)
        if self._config.results:
            report.write(self._config.results)
        return report

    def _save(self, step: int) -> None:
        self._sync()  # ends the step: its program is the same as that of a step without a save
        if spmd.is_planning():
            return
        path = self._config.checkpoint.replace("{step}", str(step))
        resume.save(path, step=step, config=self._config, data=self._data, parts=self._parts)
        self.log.say(f"step {step:5d}  saved to {path}")

    def _sync(self) -> None:
        if self._on_xla:
            spmd.sync()
