"""A run's figures: device scalars in, read late so that the device never waits for them; step times, MFU and a `Report` out."""

import math
from collections import deque
from typing import Any

import torch

import spmd_core as spmd
from examples.gpt2.log import Report, RunLog
from examples.gpt2.mfu import ModelSize, mfu
from examples.gpt2.timing import StepClock


class Meter:
    """Collects losses as they are recorded and turns them into numbers when `read` is called.

    Args:
        report: filled in as the run goes; `config`, `num_devices` and the peak are already in it.
        size: what the MFU formulas take.
        tokens_per_step: over all devices.
        run_log: where the numbers go.
        on_xla: whether the device counts programs.
    """

    def __init__(
        self,
        report: Report,
        *,
        size: ModelSize,
        tokens_per_step: int,
        run_log: RunLog,
        on_xla: bool,
    ) -> None:
        self._report = report
        self._size = size
        self._tokens_per_step = tokens_per_step
        self._log = run_log
        self._on_xla = on_xla
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor, float]] = deque()
        self._clock = StepClock()
        self._counters_before = self._counters()

    def add(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Keeps the scalars of one step, wherever they are. Does not wait."""
        self._pending.append((step, loss, grad_norm, lr))
        self._log.advance()

    def read(self, *, up_to: int) -> None:
        """Reads what was kept up to and including the step `up_to`, which waits for it, and logs the newest."""
        read = False
        while self._pending and self._pending[0][0] <= up_to:
            step, loss, grad_norm, lr = self._pending.popleft()
            self._report.losses.append(loss.item())
            self._report.grad_norms.append(grad_norm.item())
            self._report.lrs.append(lr)
            read = True
        if read:
            self._log_step(
                step,
                self._clock.mark(
                    step=step, in_flight=len(self._pending), num_compiles=self._compiles()
                ),
            )

    def evaluated(self, step: int, loss: float) -> None:
        """Logs an evaluation, made after everything up to `step` was read; the time that it took is not a step's."""
        self._clock.resume(step=step, num_compiles=self._compiles())
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self._report.evals.append({"step": step, "loss": loss, "perplexity": perplexity})
        self._log.scalars(step, {"eval/loss": loss, "eval/perplexity": perplexity})
        self._log.say(f"step {step:5d}  evaluation: loss {loss:.4f}, perplexity {perplexity:.2f}")

    def finished(self, *, wall_s: float, interrupted: bool) -> Report:
        """The report, complete."""
        report = self._report
        report.wall_s, report.interrupted = wall_s, interrupted
        report.step_time_s, report.num_timed_steps = (
            self._clock.step_time_s,
            self._clock.num_timed_steps,
        )
        if report.step_time_s:
            report.tokens_per_s = self._tokens_per_step / report.step_time_s
            report.mfu = self._mfu(report.tokens_per_s)
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
            report.program_flops, report.program_ops = program.flops, program.num_ops
        return report

    def _log_step(self, step: int, step_time_s: float | None) -> None:
        report = self._report
        tokens_per_s = self._tokens_per_step / step_time_s if step_time_s else None
        shares = self._mfu(tokens_per_s) if tokens_per_s else {}
        program = self._step_program()
        values = {
            "train/loss": report.losses[-1],
            "train/lr": report.lrs[-1],
            "train/grad_norm": report.grad_norms[-1],
        }
        speed = {
            "speed/step_time_s": step_time_s,
            "speed/tokens_per_s": tokens_per_s,
            "memory/peak_bytes": program.peak_bytes if program else None,
        }
        self._log.scalars(
            step, values | speed | {f"mfu/{name}": share for name, share in shares.items()}
        )
        timing = (
            f"{step_time_s * 1e3:9.1f} ms  {tokens_per_s:10,.0f} tokens/s  MFU {shares['6N']:.2%} (6N)"
            if step_time_s and tokens_per_s
            else ""
        )
        self._log.say(
            f"step {step:5d}  loss {report.losses[-1]:.4f}  lr {report.lrs[-1]:.2e}  norm {report.grad_norms[-1]:.3f}  {timing}".rstrip()
        )

    def _mfu(self, tokens_per_s: float) -> dict[str, float]:
        return mfu(
            self._size,
            tokens_per_s=tokens_per_s,
            num_devices=self._report.num_devices,
            peak_flops=self._report.peak_flops,
        )

    def _step_program(self) -> Any:
        """The record of the program that runs at each step: of this run's large programs, the one that ran most often.

        The first step's program makes the optimizer's state and runs once; an evaluation's is small, though it may run often.
        """
        programs = self._programs()
        largest = max((program.num_ops for program in programs), default=0)
        return max(
            (program for program in programs if program.num_ops > largest / 2),
            key=lambda program: program.executions,
            default=None,
        )

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
