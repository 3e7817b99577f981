"""Names for the axes of a mesh that a search chose, by what they split."""

from collections import Counter
from collections.abc import Sequence

from spmd_core.auto.candidates import Candidate
from spmd_core.auto.costs import NONE
from spmd_core.auto.groups import Groups


def axis_names(groups: Groups, candidate: Candidate) -> tuple[str, ...]:
    """A name for each axis: `data`, `fsdp` or `tensor`, with a number if several would have it.

    An axis that splits a dim of weights in most of the FLOPs that it splits is called `tensor`. Any
    other splits the batch, or something like it; it is called `fsdp` if it also splits most of the
    parameters' bytes where they are stored, else `data`.
    """
    names = [_name(groups, choice) for choice in candidate.solution.choices]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name}{seen[name]}" if counts[name] > 1 else name)
    return tuple(found)


def _name(groups: Groups, choice: Sequence[int]) -> str:
    step = groups.step
    in_weights = elsewhere = 0
    for i, operation in enumerate(step.operations):
        if not operation.flops:
            continue
        c = choice[groups.tie[groups.of_operation[i]]]
        split = [f for f in operation.factors if groups.factor_class[i, f] == c]
        if not split:
            continue
        of_weights = {
            f
            for t, dims in operation.dims
            if groups.of_tensor[t] in groups.of_state
            for d in dims
            for f in d
        }
        if of_weights.isdisjoint(split):
            elsewhere += operation.flops
        else:
            in_weights += operation.flops
    if in_weights > elsewhere:
        return "tensor"
    total = stored = 0
    for leaf in step.updated:
        c = choice[groups.tie[groups.of_tensor[leaf]]]
        size = step.tensors[leaf].num_bytes
        total += size
        stored += size if c != NONE and groups.dim_of(leaf, c) is not None else 0
    return "fsdp" if 2 * stored > total else "data"
