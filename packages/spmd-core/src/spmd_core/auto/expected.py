"""What a candidate's compiled program is expected to take, before it is compiled.

By the figure that decides among compiled programs (`tried.program_seconds`): the roofline of FLOPs
and of reading and writing inputs and results once, and then the collectives, here those of Shardy's
propagation. What else was modelled, as each operation's traffic of memory, counts where it decides.
"""

import math
from dataclasses import replace

from spmd_core.auto.costs import CostModel
from spmd_core.auto.groups import Groups
from spmd_core.auto.machine import Machine
from spmd_core.auto.solve import work_of
from spmd_core.auto.tried import Tried, hidden_work

# Candidates whose figures differ by less, relatively, compile to the same.
_SAME = 1e-3
# How much more than the best program so far a candidate is expected to take that is not compiled:
# XLA joins collectives that propagation counts one by one, such as those of two gradients that are
# added.
_HOPELESS = 1.2


def expected_s(groups: Groups, one: Tried, machine: Machine, collectives_s: float) -> float:
    """The seconds that the program of a candidate is expected to take.

    Args:
        groups: the step.
        one: the candidate.
        machine: the devices.
        collectives_s: the seconds of its collectives.
    """
    unlimited = replace(machine, memory_bytes_per_s=math.inf)
    model = CostModel(groups, one.candidate.mesh_shape, unlimited, one.shardings.mesh.ids)
    compute = max(
        work_of(model, one.candidate.solution.choices),
        hidden_work(one.candidate.solution, machine),
    )
    memory = _least_bytes(groups, one) / machine.memory_bytes_per_s
    return max(compute, memory) + collectives_s


def _least_bytes(groups: Groups, one: Tried) -> float:
    """The bytes that a device reads and writes at least: inputs, and what replaces them."""
    step, total = groups.step, 0
    for i, sharding in enumerate(one.shardings.leaves):
        spec = step.tensors[i].spec
        size = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        total += size * (2 if i in step.updated else 1)
    return float(total)


def are_twins(a: Tried, b: Tried) -> bool:
    """Whether two candidates on equal meshes send and hold the same, so that one is enough."""
    if a.propagated_s is None or b.propagated_s is None:
        return False
    return a.candidate.mesh_shape == b.candidate.mesh_shape and all(
        math.isclose(x, y, rel_tol=_SAME)
        for x, y in (
            (a.propagated_s, b.propagated_s),
            (a.sent, b.sent),
            (a.candidate.solution.bytes, b.candidate.solution.bytes),
        )
    )


def may_be_better(one: Tried, best: Tried | None) -> bool:
    """Whether a candidate may turn out to be faster than the best program so far.

    Args:
        one: the candidate.
        best: what was compiled and fits; None if nothing has.
    """
    if best is None or best.seconds is None or one.expected_s is None:
        return True
    # What is expected has the FLOPs of custom kernels, which the compiler does not count.
    return one.expected_s <= _HOPELESS * max(best.seconds, best.expected_s or 0.0)
