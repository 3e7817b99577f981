"""Which values of a loop's iterations are stacked for those who read them elsewhere.

Not stacked is what a later loop can compute again from less: what only rearranges, repeats, casts
or marks a value that is there in any case, and what is cheap (`graph.cheap`). What is the same in
all iterations, such as a mask, is computed once, before the loop.
"""

from spmd_core.graph.cheap import is_cheap
from spmd_core.ops.kernels.traits import Elements
from spmd_core.program.chosen_runs import Readers, is_last_carry
from spmd_core.program.ir import Op
from spmd_core.program.repeated_runs import Carried, Kept, Local, Operand, Run, Runs, Shared


class KeptValues:
    """What is kept of the iterations of each run.

    Attributes:
        stacked: for each run, the values that are stacked.
        constant: for each run, values that are the same in all iterations, and are read elsewhere.

    Args:
        runs: the runs that become loops.
        readers: what is read of them elsewhere.
    """

    def __init__(self, runs: Runs, readers: Readers) -> None:
        self._runs = runs
        self._is_same: dict[tuple[Run, int], bool] = {}
        self._is_numbers: dict[tuple[Run, int], bool] = {}
        self.stacked: dict[Run, dict[Local | Carried, None]] = {run: {} for run in runs.all}
        self.constant: dict[Run, set[Local]] = {run: set() for run in runs.all}
        for run in runs.all:
            for operand in run.reads():
                if isinstance(operand, Kept):
                    self._keep(operand.run, operand.value)
        for run in runs.all:
            stacked = self.stacked[run]
            for name in [*stacked]:
                if isinstance(name, Local) and (
                    self._is_cast_of(run, name, stacked) or self._is_cheap(run, name)
                ):
                    del stacked[name]
                    self._keep_constants(run, name)
            for name, iterations in readers.apart[run].items():
                if any(not is_last_carry(run, name, i) for i in iterations):
                    self._keep_itself(run, name)

    def _keep(self, run: Run, name: Local | Carried) -> None:
        if isinstance(name, Carried) or not self._is_made_again(run, name):
            self._keep_itself(run, name)
            return
        for operand in run.operands[name.position]:
            if isinstance(operand, (Local, Carried)):
                self._keep(run, operand)

    def _keep_itself(self, run: Run, name: Local | Carried) -> None:
        if isinstance(name, Local) and self.is_constant(run, name.position):
            self.constant[run].add(name)
        else:
            self.stacked[run][name] = None

    def _op(self, run: Run, name: Local) -> Op:
        return self._runs.op(run, run.low, name.position)

    def is_constant(self, run: Run, position: int) -> bool:
        """Whether all iterations compute the same."""
        found = self._is_same.get((run, position))
        if found is None:
            op = self._runs.op(run, run.low, position)
            found = self._is_same[run, position] = not (
                op.scalars or op.entry.random or op.bodies
            ) and all(
                self.is_constant(run, x.position) if isinstance(x, Local) else isinstance(x, Shared)
                for x in run.operands[position]
            )
        return found

    def _is_of_numbers(self, run: Run, position: int) -> bool:
        """Whether iterations compute the same but for their numbers, such as a mask of `-inf`."""
        found = self._is_numbers.get((run, position))
        if found is None:
            op = self._runs.op(run, run.low, position)
            found = self._is_numbers[run, position] = not (op.entry.random or op.bodies) and all(
                isinstance(x, Shared)
                or (isinstance(x, Local) and self._is_of_numbers(run, x.position))
                for x in run.operands[position]
            )
        return found

    def _is_made_again(self, run: Run, name: Local) -> bool:
        """Whether a value is computed again from its operand."""
        op = self._op(run, name)
        if self.is_constant(run, name.position):
            return False
        if self._is_of_numbers(run, name.position):
            return True
        if not _rearranges(op):
            return False
        (operand,) = run.operands[name.position]
        comes_from_outside = self._comes_from_outside(run, operand)
        if op.entry.sharding is not None:
            # A mark of a parameter may gather it, which the program did not ask for again.
            return not comes_from_outside
        return comes_from_outside or op.operands[0].spec.num_bytes <= op.entry.spec.num_bytes

    def _comes_from_outside(self, run: Run, operand: Operand) -> bool:
        """Whether an operand is a row of a stack or the like, but for its arrangement and dtype."""
        if not isinstance(operand, Local):
            return not isinstance(operand, Carried)
        op = self._op(run, operand)
        if not _rearranges(op) or op.entry.sharding is not None:
            return False
        return self._comes_from_outside(run, run.operands[operand.position][0])

    def _is_cast_of(self, run: Run, name: Local, stacked: dict[Local | Carried, None]) -> bool:
        """Whether a value is a narrower cast of one that is stacked as well."""
        if not _rearranges(self._op(run, name)):
            return False
        (operand,) = run.operands[name.position]
        return isinstance(operand, (Local, Carried)) and operand in stacked

    def _is_cheap(self, run: Run, name: Local) -> bool:
        """Whether a value is cheap to compute again from values that are stacked as well."""
        operands = run.operands[name.position]
        return is_cheap(self._op(run, name).entry) and all(self._is_there(run, x) for x in operands)

    def _is_there(self, run: Run, operand: Operand) -> bool:
        """Whether a later run has an operand, or computes it again."""
        if isinstance(operand, Carried) or operand in self.stacked[run]:
            return operand in self.stacked[run]
        if not isinstance(operand, Local) or self.is_constant(run, operand.position):
            return True
        if self._is_made_again(run, operand) or is_cheap(self._op(run, operand).entry):
            return all(self._is_there(run, x) for x in run.operands[operand.position])
        return False

    def _keep_constants(self, run: Run, name: Local) -> None:
        """Keeps what is the same in all iterations, of what a value is computed from again."""
        for operand in run.operands[name.position]:
            if isinstance(operand, Local) and operand not in self.stacked[run]:
                if self.is_constant(run, operand.position):
                    self.constant[run].add(operand)
                else:
                    self._keep_constants(run, operand)


def _rearranges(op: Op) -> bool:
    return op.entry.traits.elements <= Elements.REPEATED and len(op.operands) == 1
