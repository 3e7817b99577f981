"""Names for the axes of a mesh that a search chose, by what they split."""

from collections import Counter

from spmd_core.auto.candidates import Candidate
from spmd_core.auto.costs import NONE
from spmd_core.auto.groups import Groups


def axis_names(groups: Groups, candidate: Candidate) -> tuple[str, ...]:
    """A name for each axis: `data`, `fsdp` or `tensor`, with a number if several would have it.

    An axis that splits the first dim of an input is called `fsdp` if it splits most of the
    parameters' bytes too, else `data`; any other axis is called `tensor`.
    """
    step = groups.step
    names = []
    for choice in candidate.solution.choices:
        batch, split, total = False, 0, 0
        for t, tensor in enumerate(step.tensors):
            if tensor.leaf is None or not tensor.spec.shape:
                continue
            c = choice[groups.tie[groups.of_tensor[t]]]
            dim = None if c == NONE else groups.dim_of(t, c)
            if tensor.leaf in step.updated:
                total += tensor.num_bytes
                split += tensor.num_bytes if dim is not None else 0
            elif dim == 0:
                batch = True
        names.append(("fsdp" if 2 * split > total else "data") if batch else "tensor")
    counts = Counter(names)
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name}{seen[name]}" if counts[name] > 1 else name)
    return tuple(found)
