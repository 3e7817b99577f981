"""Has a TPU's program make gradients, and casts of parameters, where they were recorded.

XLA's TPU compiler orders operations by what they free and take at their place, and sees no further:

- The gradient of a parameter is read at the end of the program, where all are clipped by their
  norm. The compiler makes it there, if it is no smaller than its operands, and keeps these until
  then, or each device's part of a gradient in place of the reduced shard.
- A checkpointed block casts its parameters in both runs. The compiler casts once, in the first one,
  and keeps the casts of the whole model until backward.

With GPT-2 over 4 devices, that was half of the temporaries. So in the second run of a block, which
begins with an optimization barrier, the barrier waits for the gradients of the block before the
last (those of the last one may be reduced meanwhile), and parameters are cast behind it. What reads
a gradient waits for all that no second run has waited for: the compiler makes an all-reduce of some
reduce-scatters, and would cut it where it is read, at the end.
"""

from collections import deque
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
    """

    values: list[jax.Array]
    sums: PartialSums
    _made: list[int] = field(default_factory=list)  # the numbers of gradients
    _blocks: deque[list[int]] = field(default_factory=deque)  # earlier ones, by block
    _waited: set[tuple[int, int]] = field(default_factory=set)  # of the sums
    _casts: set[tuple[int, object]] = field(default_factory=set)  # of leaves
    _start: jax.Array | None = None  # what the current second run waits for

    def add(self, node: Node, number: int) -> None:
        """Notes an operation, of which this is the number of the first result."""
        if node.entry.name in (MARK, MARK_AT_ONCE):
            self._made.append(number)

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
        elif {*node.inputs} & {*self._made, *(n for block in self._blocks for n in block)}:
            inputs = self._after_all_gradients(node, inputs)
        return inputs

    def _after_all_gradients(self, node: Node, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        numbers = [*(n for block in self._blocks for n in block), *self._made]
        behind = dict(zip(numbers, jax.lax.optimization_barrier([self.values[n] for n in numbers])))
        for number, x in behind.items():
            self.values[number] = x
        self._blocks.clear()
        self._made = []
        return [behind.get(number, x) for number, x in zip(node.inputs, inputs)]

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
        if self._made:
            self._blocks.append(self._made)
            self._made = []
        numbers = self._blocks.popleft() if len(self._blocks) > 1 else []
        if not numbers and not parts:
            return inputs
        made = ([self.values[n] for n in numbers], [self.sums.parts[key] for key in parts])
        inputs, (values, sums) = jax.lax.optimization_barrier(([*inputs], made))
        for number, x in zip(numbers, values):
            self.values[number] = x
        self.sums.parts.update(zip(parts, sums))
        self._waited.update(parts)
        return inputs
