"""Which dims of a step are its batch, followed from the inputs through all operations."""

from collections import Counter
from collections.abc import Collection

from spmd_core.auto.groups import Groups


def batch_classes(groups: Groups, inputs: Collection[int]) -> dict[int, int]:
    """For each group with a batch dim, the class of that dim.

    The batch is dim 0 of the inputs: of those whose dim 0 has the size that most of them share.

    Args:
        groups: the step.
        inputs: the leaves that come anew with each step.
    """
    step = groups.step
    sizes = Counter(step.tensors[t].spec.shape[0] for t in inputs if step.tensors[t].spec.shape)
    if not sizes:
        return {}
    size = max(sizes, key=lambda n: (sizes[n], n))
    found: dict[int, int] = {}

    def add(group: int, group_class: int | None) -> None:
        if group_class is not None:
            found.setdefault(group, group_class)

    for t in inputs:
        if step.tensors[t].spec.shape[:1] == (size,):
            add(groups.of_tensor[t], groups.tensor_class.get((t, 0)))
    for i, operation in enumerate(step.operations):
        own = groups.of_operation[i]
        for t, dims in operation.dims[: len(operation.operands)]:
            c = found.get(groups.of_tensor[t])
            dim = None if c is None else groups.dim_of(t, c)
            if dim is not None and dims[dim]:
                add(own, groups.factor_class.get((i, dims[dim][0])))
        if own not in found:
            continue
        for t, dims in operation.dims[len(operation.operands) :]:
            for d, factors in enumerate(dims):
                if factors and groups.factor_class[i, factors[0]] == found[own]:
                    add(groups.of_tensor[t], groups.tensor_class.get((t, d)))
    return found
