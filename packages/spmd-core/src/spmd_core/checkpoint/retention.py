"""Which steps stay when a new one is whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmd_core.errors import CheckpointError


@dataclass(frozen=True)
class Written:
    """A step on the disk.

    Attributes:
        step: its number.
        time_s: when its save began, in seconds since 1970 by the clock of that time.
        metrics: what was given with it.
    """

    step: int
    time_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Retention:
    """What stays: each step for which one of these holds, and always the newest.

    Attributes:
        keep: so many of the newest; None: all.
        keep_every: those that are multiples of it.
        keep_for_s: those that are younger.
        keep_best: the one with the best value of this metric: `"loss"` the lowest, `"-loss"` the
            highest.
    """

    keep: int | None = None
    keep_every: int | None = None
    keep_for_s: float | None = None
    keep_best: str | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} is a whole number from 1, or None; got {value!r}. Write for instance "
                    f"{name}=3."
                )
        if self.keep_for_s is not None and not self.keep_for_s >= 0:
            raise ValueError(
                f"keep_for_s counts seconds, from 0; got {self.keep_for_s!r}. Write for instance "
                "keep_for_s=3600.0, or leave it out."
            )

    def metric(self) -> tuple[str, int] | None:
        """The metric of `keep_best`, and 1 if low values are good or -1."""
        if self.keep_best is None:
            return None
        return self.keep_best.removeprefix("-"), -1 if self.keep_best.startswith("-") else 1

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises CheckpointError for metrics without that of `keep_best`."""
        metric = self.metric()
        if metric is not None and metric[0] not in metrics:
            raise CheckpointError(
                f"with keep_best={self.keep_best!r}, each save has that metric; got "
                f"{sorted(metrics)}. Pass metrics={{{metric[0]!r}: value}}."
            )

    def removed(self, steps: Sequence[Written], now_s: float) -> list[int]:
        """The steps that go. A clock that goes backwards removes none.

        Args:
            steps: those that are whole.
            now_s: the time.
        """
        if self.keep is None:
            return []
        ordered = sorted(steps, key=lambda one: one.step)
        kept = {one.step for one in ordered[-self.keep :]}
        if self.keep_every is not None:
            kept |= {one.step for one in ordered if one.step % self.keep_every == 0}
        if self.keep_for_s is not None:
            kept |= {one.step for one in ordered if now_s - one.time_s < self.keep_for_s}
        metric = self.metric()
        if metric is not None:
            name, sign = metric
            rated = [one for one in ordered if one.metrics.get(name) == one.metrics.get(name)]
            rated = [one for one in rated if name in one.metrics]
            if rated:
                kept.add(min(rated, key=lambda one: (sign * one.metrics[name], -one.step)).step)
        return [one.step for one in ordered if one.step not in kept]
