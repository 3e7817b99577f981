"""Collects a run's figures, reading losses late so that the device never waits for Python."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

import spmd_core as spmd
from examples.training.collector import exempt_new
from examples.training.log import Report, RunLog, figures_text
from spmd_core.metrics import (
    ModelSize,
    ProgramRecord,
    StepTimes,
    count_flops,
    flops_per_token,
    mfu,
    step_program,
    traffic,
)


@dataclass(frozen=True)
class Work:
    """What a step computes, by which its speed is counted.

    Attributes:
        model: its name.
        num_params: of the model, padding included.
        items: in a batch, over all devices.
        unit: what an item is, in the plural, such as "tokens" or "images".
        flops_per_item: forward and backward FLOPs for one item, by formula; the console shows the
            first formula's MFU. Empty: no MFU.
    """

    model: str
    num_params: int
    items: int
    unit: str
    flops_per_item: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def on_tokens(cls, model: str, size: ModelSize, *, batch: int) -> Self:
        """The work of a transformer, of that name and size, on a batch of so many sequences."""
        return cls(model, size.num_params, batch * size.seq, "tokens", flops_per_token(size))


class Meter:
    """Keeps losses as device scalars and turns them into numbers when `read` is called.

    Args:
        report: filled in during the run; `config`, `num_devices` and the peak are set beforehand.
        work: what a step computes.
        log_every: steps between two rows of the log; the newest step that `read` reads has one too.
        lag: how many steps late `read_due` reads, so that the device never waits for Python.
        run_log: where the numbers are written.
        on_xla: whether the model runs on the XLA device, which counts compiles and programs.
    """

    def __init__(
        self,
        report: Report,
        *,
        work: Work,
        log_every: int = 1,
        lag: int = 0,
        run_log: RunLog,
        on_xla: bool,
    ) -> None:
        self._report = report
        self._report.unit = work.unit
        self._work = work
        self._log_every, self._lag = log_every, lag
        self._log = run_log
        self._on_xla = on_xla
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor, float]] = deque()
        self._clock = StepTimes()
        self._counters_before = self._counters()
        self._num_compiles = self._compiles()

    def add(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Keeps the scalars of one step on their device. Does not wait."""
        self._pending.append((step, loss, grad_norm, lr))
        self._log.advance()

    def read(self, *, up_to: int) -> None:
        """Reads the scalars of all steps up to and including `up_to`, and logs the newest of them,
        with the others that have a row.

        Waits until the device has computed that step. In a plan, which computes no values, it drops
        them.
        """
        if spmd.debugging.is_planning():
            self._pending.clear()
        rows = []
        while self._pending and self._pending[0][0] <= up_to:
            step, *scalars, lr = self._pending.popleft()
            loss, grad_norm = (scalar.item() for scalar in scalars)
            self._report.losses.append(loss)
            self._report.grad_norms.append(grad_norm)
            self._report.lrs.append(lr)
            is_newest = not self._pending or self._pending[0][0] > up_to
            if is_newest or step % self._log_every == 0:
                rows.append((step, loss, grad_norm, lr))
        if rows:
            num_compiles = self._compiles()
            if num_compiles > self._num_compiles:
                exempt_new()  # in a step whose time counts as none
            self._num_compiles = num_compiles
            # The mean over all steps since the last read, whether or not they have rows.
            step_time_s = self._clock.mark(
                step=step, in_flight=len(self._pending), num_compiles=num_compiles
            )
            for row in rows:
                self._log_step(*row, step_time_s)

    def read_due(self) -> None:
        """Reads up to the step `lag` steps ago, if that step has a row."""
        due = self._pending[-1][0] - self._lag if self._pending else 0
        if due % self._log_every == 0:
            self.read(up_to=due)

    def evaluated(self, step: int, **figures: float) -> None:
        """Logs an evaluation's figures, such as `loss`; its duration counts for no step.

        Call it after reading all steps up to `step`. A plan has no figures.
        """
        if spmd.debugging.is_planning():
            return
        self._clock.resume(step=step, num_compiles=self._compiles())
        self._report.evals.append({"step": step, **figures})
        self._log.scalars(step, {_evaluation_tag(name): value for name, value in figures.items()})
        self._log.say(f"step {step:5d}  evaluation: {figures_text(figures)}")

    def finished(self, *, wall_s: float, interrupted: bool) -> Report:
        """The complete report."""
        report = self._report
        report.wall_s, report.interrupted = wall_s, interrupted
        report.step_time_s, report.num_timed_steps = self._clock.median_s, self._clock.num_steps
        report.step_time_quartiles_s = self._clock.quartiles_s
        if report.step_time_s:
            report.items_per_s = self._work.items / report.step_time_s
            report.mfu = self._mfu(report.items_per_s)
        now = self._counters()
        report.compiles, report.executions = (
            now.get(name, 0) - self._counters_before.get(name, 0)
            for name in ("compiles", "executions")
        )
        report.compile_s = sum(program.compile_s for program in self._programs())
        program = self._step_program()
        if program is not None:
            report.peak_bytes, report.argument_bytes, report.temp_bytes = (
                program.peak_bytes,
                program.argument_bytes,
                program.temp_bytes,
            )
            counted = count_flops(program)
            report.program_flops, report.recorded_flops = counted.by_compiler, counted.by_torch
            report.program_ops = program.num_ops
            report.collectives = [
                {
                    "kind": moved.kind,
                    "axes": ",".join(moved.axes),
                    "number": moved.number,
                    "moved_bytes": moved.moved_bytes,
                }
                for moved in traffic(program)
            ]
        return report

    def _log_step(
        self, step: int, loss: float, grad_norm: float, lr: float, step_time_s: float | None
    ) -> None:
        report = self._report
        items_per_s = self._work.items / step_time_s if step_time_s else None
        shares = self._mfu(items_per_s) if items_per_s else {}
        program = self._step_program()
        values = {
            "loss/train": loss,
            "optimizer/lr": lr,
            "optimizer/grad_norm": grad_norm,
        }
        speed = {
            "speed/step_time_s": step_time_s,
            f"speed/{report.unit}_per_s": items_per_s,
            "program/peak_bytes": program.peak_bytes if program else None,
        }
        self._log.scalars(
            step, values | speed | {f"mfu/{name}": share for name, share in shares.items()}
        )
        timing = ""
        if step_time_s and items_per_s:
            timing = f"{step_time_s * 1e3:9.1f} ms  {items_per_s:10,.0f} {report.unit}/s"
        for name, share in list(shares.items())[:1]:
            timing += f"  MFU {share:.2%} ({name})"
        self._log.say(
            f"step {step:5d}  loss {loss:.4f}  lr {lr:.2e}  norm {grad_norm:.3f}  {timing}".rstrip()
        )

    def _mfu(self, items_per_s: float) -> dict[str, float]:
        return mfu(
            self._work.flops_per_item,
            items_per_s=items_per_s,
            num_devices=self._report.num_devices,
            peak_flops=self._report.peak_flops,
        )

    def _step_program(self) -> ProgramRecord | None:
        return step_program(since=self._counters_before["compiles"]) if self._on_xla else None

    def _compiles(self) -> int:
        return self._counters().get("compiles", 0)

    def _counters(self) -> dict[str, int]:
        return spmd.metrics.counters() if self._on_xla else {}

    def _programs(self) -> list[Any]:
        return (
            list(spmd.metrics.programs(since=self._counters_before["compiles"]))
            if self._on_xla
            else []
        )


def _evaluation_tag(figure: str) -> str:
    """TensorBoard sorts by tags and opens the first, losses: "loss/eval" beside training's."""
    prefix, is_loss, rest = figure.rpartition("loss")
    return f"loss/{prefix}eval" if is_loss and not rest else f"score/{figure}"
