"""The plan of a pipeline's ticks: which microbatch enters and leaves, and which chunk runs.

p stages, m microbatches, v rounds. The blocks are cut into p·v chunks, and stage s has the chunks
s, s + p, ..., s + (v-1)·p. In each tick every stage runs one chunk on one microbatch, then all
microbatches move on to the next stage, from the last one to the first. Microbatches go in groups of
p: a group makes all its rounds before the next one enters, so that what comes back from the last
stage is what the first one needs next (Narayanan et al. 2021, "Efficient large-scale language model
training on GPU clusters using Megatron-LM", section 2.2). One round is GPipe (Huang et al. 2019).
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """What the stages do in one tick.

    Attributes:
        entering: the microbatch that the first stage starts; None: it goes on with what the last
            stage sends.
        leaving: the microbatch that the last stage ends; None if it ends none.
        round: the round of the stages up to `last_ahead`.
        behind: the round of the stages after that one.
        last_ahead: a stage.
    """

    entering: int | None
    leaving: int | None
    round: int
    behind: int
    last_ahead: int


@dataclass(frozen=True)
class PipelinePlan:
    """The sizes of a pipeline.

    Attributes:
        num_stages: p, the size of the mesh axis.
        num_microbatches: m.
        rounds: v, how often each microbatch visits each stage.
    """

    num_stages: int
    num_microbatches: int
    rounds: int = 1

    @property
    def num_ticks(self) -> int:
        """Ticks of a forward; m·v + p - 1 if v is 1 or p divides m."""
        p, m = self.num_stages, self.num_microbatches
        groups, in_last = -(-m // p), (m - 1) % p + 1
        return (groups * self.rounds - 1) * p + in_last + p - 1

    @property
    def bubble_fraction(self) -> float:
        """The part of the ticks in which a stage has nothing useful to do: (p-1) / (m·v + p - 1).

        More if v is over 1 and p does not divide m: the last group then has gaps.
        """
        return (self.num_ticks - self.num_microbatches * self.rounds) / self.num_ticks

    def ticks(self) -> Iterator[Tick]:
        """The ticks of a forward, in order."""
        p, v = self.num_stages, self.rounds
        num_visits = -(-self.num_microbatches // p) * v  # of all groups at a stage
        for t in range(self.num_ticks):
            visit, position = divmod(t, p)
            # Idle stages run the same round as the others, so that no selection is needed.
            ahead = min(visit, num_visits - 1) % v
            behind = (max(visit - 1, 0)) % v
            yield Tick(
                entering=self._microbatch(t, round=0),
                leaving=self._microbatch(t - (p - 1), round=v - 1),
                round=ahead,
                behind=behind if visit > 0 else ahead,
                last_ahead=position,
            )

    def _microbatch(self, slot: int, *, round: int) -> int | None:
        """The microbatch that a stage works on in its tick `slot`, if it is in that round."""
        visit, position = divmod(slot, self.num_stages)
        group, its_round = divmod(visit, self.rounds)
        microbatch = group * self.num_stages + position
        fits = slot >= 0 and its_round == round and microbatch < self.num_microbatches
        return microbatch if fits else None
