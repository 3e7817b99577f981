"""The record of a run: its log, figures, saved states, orderly end and report.

At its beginning it gives the parts of a resumed run their saved state. Then it takes figures, and
never touches a model or an optimizer: the loop is the recipe's.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, repeat
from typing import Any, Protocol, Self

import torch

import spmd_core as spmd
from examples.training.collector import long_lived
from examples.training.log import Report, RunLog, axes_text
from examples.training.meter import Meter, Work
from examples.training.resume import SaveError, Saves, Stateful
from examples.training.run_config import RunConfig
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
                journal.add(loss, grad_norm)
                if journal.evaluation_is_due():
                    journal.evaluated(loss=...)
            report = journal.finish()

    Inside the block, Ctrl-C and SIGTERM end the run after a step, SIGTERM within --deadline, and
    the garbage collector does not examine objects that were alive before.

    Args:
        config: the run's options.
        first: the step to go on from, as `resume.step_of` gave it; None for a new run.
        device, mesh: where the model is; no mesh for one device, and for one that is found.
        work: what a step computes.
        data: what the model is trained on.
        parts: what is saved, and what a resumed run goes on with, by name: the model, the
            optimizer, the scheduler and the batches, and what else has a state.

    Attributes:
        log: where its lines go; the recipe may write more.
        report: the figures so far.

    Raises:
        ResumeError: the saved run has other data or other parts, or it is damaged, or still runs.
        SaveError: the folder of --checkpoint cannot be written.
    """

    def __init__(
        self,
        config: RunConfig,
        first: int | None,
        *,
        device: torch.device,
        mesh: spmd.Mesh | None,
        work: Work,
        data: Data,
        parts: Mapping[str, Stateful],
    ) -> None:
        self._saves = Saves(config, data=data.identity, parts=parts)
        begins = self._saves.restore(first)
        self._config, self._first = config, first or 0
        self._on_xla = config.device == "xla"
        self._step = self._first
        self._scheduler: Any = parts["scheduler"]
        self._stack = ExitStack()
        self._model: Any = parts["model"]
        self._is_mesh_due = config.finds_mesh
        axes = _axes(mesh) if mesh else {}
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        computing = _all_devices() if config.finds_mesh else mesh
        peak = device_peak(device, computing, dtype=dtype)
        self.report = Report(
            config=dataclasses.asdict(config),
            num_params=work.num_params,
            num_devices=computing.size() if computing else 1,
            device_kind=device_kind(device),
            mesh=axes,
            resumed_at=self._first,
            peak_flops=peak.flops_per_s,
            peak_source=peak.source,
        )
        self.log = RunLog(
            log_dir=config.log_dir,
            num_steps=config.steps,
            first_step=self._first,
            shows_progress=config.progress,
        )
        self.log.settings(self.report.config)
        if mesh:
            self.log.mesh(mesh)
        shown = "mesh auto" if config.finds_mesh else axes or ""
        where = f"{self.report.num_devices} {config.device} device(s) {shown}".rstrip()
        self.log.say(f"data   {data.summary}")
        self.log.say(f"model  {work.model}, {work.num_params:,} parameters, on {where}")
        if self._on_xla and config.capture and (reason := config.recorded_because()):
            self.log.say(f"step   recorded at each call: {reason}")
        self._say(begins)
        self._meter = Meter(
            self.report,
            work=work,
            run_log=self.log,
            log_every=config.log_every,
            lag=READ_LAG if self._on_xla else 0,
            on_xla=self._on_xla,
        )

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(self.log.close)
            stack.enter_context(self._saves)
            stack.enter_context(spmd.distributed.stop_on_signals(deadline_s=self._config.deadline))
            stack.enter_context(long_lived())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def steps(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The number and the batch of each step that is left; of as many epochs as that takes.

        After a step, the run is saved if --save-every says so, and Ctrl-C or SIGTERM ends the
        steps, in all processes after the same one. On the XLA device, `MpDeviceLoader` sends a step
        to the device before it gives the next batch. A finished run that is resumed has no step.
        """
        # No frame of this file asks for a batch: the program that a request starts is said to be of
        # the loop's line.
        return zip(self._numbers(), chain.from_iterable(repeat(batches)))

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Keeps the scalars of this step, and logs those of an earlier one.

        It waits for the device only if an evaluation is due: the step ends here then, as the
        evaluation is a program of its own.
        """
        self._say_mesh_if_found()
        self._meter.add(self._step, loss, grad_norm, self._lr)
        if self.evaluation_is_due():
            self._sync()
            self._meter.read(up_to=self._step)
        else:
            self._meter.read_due()

    def evaluation_is_due(self) -> bool:
        """Whether this step has one: every --eval-every steps, and after the last one."""
        every, number = self._config.eval_every, self._config.eval_batches
        is_due = self._step == self._config.steps or (every and self._step % every == 0)
        return bool(number and is_due)

    def evaluated(self, **figures: float) -> None:
        """Logs an evaluation's figures, such as `loss`; its duration counts for no step."""
        self._meter.evaluated(self._step, **figures)

    def finish(self) -> Report:
        """Reads what is not read yet, saves the run, and writes the report. Waits for the device.

        In a plan, which has no values, it ends the last step and writes nothing.

        Raises:
            SaveError: the run could not be saved.
        """
        self._sync()
        self._say_mesh_if_found()
        if spmd.debugging.is_planning():
            return self.report
        self._meter.read(up_to=self._config.steps)
        if self._first < self._config.steps:
            self._say(self._saves.save(self._step))
            self._saves.wait()
        wall_s = time.perf_counter() - self._start_s
        report = self._meter.finished(wall_s=wall_s, interrupted=self.report.interrupted)
        self.log.finish(report)
        if self._config.results:
            report.write(self._config.results)
        return report

    def _numbers(self) -> Iterator[int]:
        """The number of each step that is left, and what comes between two steps."""
        for step in range(self._first + 1, self._config.steps + 1):
            self._step, self._lr = step, self._next_lr()
            yield step
            if spmd.distributed.should_stop():
                self.report.interrupted = True
                self.report.preempted = spmd.distributed.was_preempted()
                why = "preempted" if self.report.preempted else "interrupted"
                self.log.say(f"{why}: ending after step {step} of {self._config.steps}")
                return
            if step < self._config.steps:
                self._save_if_due()

    def _next_lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def _save_if_due(self) -> None:
        try:
            self._say(self._saves.save_if_due(self._step))
        except SaveError as error:  # the disk may have space by the next save
            self._say(f"error: {error} The run goes on.")

    def _say_mesh_if_found(self) -> None:
        """Says the mesh of --mesh auto once: the marks of the parameters have it."""
        if not self._is_mesh_due:
            return
        mesh = found_mesh(self._model)
        if mesh is not None:
            self._is_mesh_due = False
            self.report.mesh = _axes(mesh)
            self.log.mesh(mesh)
            self.log.say(f"mesh   auto: {axes_text(self.report.mesh)}, found for the first step")

    def _say(self, text: str) -> None:
        if text:
            self.log.say(text)

    def _sync(self) -> None:
        if self._on_xla:
            spmd.sync()


def found_mesh(model: torch.nn.Module) -> spmd.Mesh | None:
    """The mesh of the marks of a model's parameters; None as long as none has one."""
    marks = (getattr(parameter, "sharding", None) for parameter in model.parameters())
    return next((mark.mesh for mark in marks if mark is not None), None)


def _axes(mesh: spmd.Mesh) -> dict[str, int]:
    return {str(name): size for name, size in mesh.shape().items()}


def _all_devices() -> spmd.Mesh:
    """All devices, along one axis."""
    count = spmd.global_runtime_device_count()
    return spmd.Mesh(range(count), (count,), ("devices",))
