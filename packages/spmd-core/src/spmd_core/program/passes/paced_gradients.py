"""Has a TPU's program make gradients, and casts of parameters, where they were recorded.

XLA's TPU compiler orders operations by what they free and take at their place, and sees no further:

- The gradient of a parameter is read at the end of the program, where all are clipped by their
  norm. The compiler makes it there, if it is no smaller than its operands, and keeps these until
  then, or each device's part of a gradient in place of the reduced shard.
- A checkpointed block casts its parameters in both runs. The compiler casts once, in the first one,
  and keeps the casts of the whole model until backward.

With GPT-2 over 4 devices, that was half of the temporaries. So in the second run of a block, which
begins with an optimization barrier, the barrier waits for all gradients but the later half of those
that the last block made (which may be reduced meanwhile), and parameters are cast behind it. What
reads a gradient waits for all that no second run has waited for: the compiler makes an all-reduce
of some reduce-scatters, and would cut it where it is read, at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from spmd_core.program.gradient_plans import MARK, MARK_AT_ONCE
from spmd_core.program.partial_sums import PartialSums
from spmd_core.program.program_graph import Node

_BARRIER, _CAST = "spmd::optimization_barrier", "aten::_to_copy"


@dataclass
class PacedGradients:
    """What barriers of second runs wait for, while a program is lowered.

    Attributes:
        values: of the program, by their numbers; what a barrier has waited for is read behind it.
        sums: of the program.
        is_summed: whether gradients are summed over devices.
    """

    values: list[jax.Array]
    sums: PartialSums
    is_summed: bool
    _made: list[int] = field(default_factory=list)  # the numbers of gradients
    _late: list[int] = field(default_factory=list)  # earlier ones, for which no barrier has waited
    _waited: set[tuple[int, int]] = field(default_factory=set)  # of the sums
    _casts: set[tuple[int, object]] = field(default_factory=set)  # of leaves
    _copied: dict[int, int] = field(default_factory=dict)  # of casts and marks: what they copy
    _start: jax.Array | None = None  # what the current second run waits for

    def add(self, node: Node, number: int) -> None:
        """Notes an operation, of which this is the number of the first result."""
        if node.entry.name in (MARK, MARK_AT_ONCE):
            self._made.append(number)
        if node.entry.name in (_CAST, MARK, MARK_AT_ONCE) and node.inputs[0] >= 0:
            self._copied[number] = node.inputs[0]

    def before(self, node: Node, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The operands of an operation, behind a barrier where they have to wait."""
        if node.entry.name == _BARRIER and len(inputs) == 2:
            inputs = self._after_gradients(inputs)
            self._start = inputs[1]
        elif node.entry.name == _CAST and node.inputs[0] < 0:
            cast = (node.inputs[0], node.entry)
            if cast in self._casts and self._start is not None:
                inputs = [jax.lax.optimization_barrier((inputs[0], self._start))[0]]
            self._casts.add(cast)
        elif not {*self._made, *self._late}.isdisjoint(node.inputs):
            inputs = self._after_all_gradients(node, inputs)
        return inputs

    def _after_all_gradients(self, node: Node, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        numbers = [*self._late, *self._made]
        self._read_behind(numbers, jax.lax.optimization_barrier(self._stored(numbers)))
        self._made, self._late = [], []
        behind = {*numbers}
        return [self.values[n] if n in behind else x for n, x in zip(node.inputs, inputs)]

    def _source(self, number: int) -> int:
        """What a gradient is a wider copy of, such as one that autocast computed; or itself.

        A gradient that devices sum is summed in the dtype of the copy.
        """
        source = number
        while not self.is_summed and source in self._copied:
            inner = self._copied[source]
            if self.values[inner].dtype.itemsize > self.values[source].dtype.itemsize:
                break
            source = inner
        return source

    def _stored(self, numbers: Sequence[int]) -> list[jax.Array]:
        """What lies in memory of gradients: what is cast, and not the cast."""
        return [self.values[self._source(number)] for number in numbers]

    def _read_behind(self, numbers: Sequence[int], stored: Sequence[jax.Array]) -> None:
        """Has all further operations read gradients from what came out of a barrier."""
        for number, x in zip(numbers, stored):
            self.values[number] = x.astype(self.values[number].dtype)

    def after(
        self, node: Node, inputs: list[jax.Array], results: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The operands for the gradient of a weight, which waits for the input's gradient.

        The weight, which was gathered for the latter, is then gone.
        """
        structure = node.entry.structure
        if node.entry.name != "aten::linear_backward" or not structure or structure[0] is None:
            return inputs
        own, _ = jax.lax.optimization_barrier((inputs, results[0]))
        return own

    def _after_gradients(self, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        # Parts of a gradient that adds up several, such as that of a table which is read twice.
        parts = [key for key in self.sums.parts if key not in self._waited]
        half = len(self._made) // 2
        numbers = [*self._late, *self._made[:half]]
        self._made, self._late = [], self._made[half:]
        if not numbers and not parts:
            return inputs
        made = (self._stored(numbers), [self.sums.parts[key] for key in parts])
        inputs, (values, sums) = jax.lax.optimization_barrier(([*inputs], made))
        self._read_behind(numbers, values)
        self.sums.parts.update(zip(parts, sums))
        self._waited.update(parts)
        return inputs
