"""Tensors that several operations read, and sums of what several make: collectives that run once.

Queries, keys and values read one tensor; where it is gathered, it is gathered once. The gradients
that they make of it are added up before their sum is reduced. So what an operation reads in another
layout than the tensor has stands between the two as an element of its own, whose layout is chosen,
and so does a sum.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from spmd_core.auto.groups import Groups
from spmd_core.source_lines import Phase


@dataclass(frozen=True)
class Shared:
    """What stands between a kind of tensors and several operations.

    Attributes:
        tie: of the tensors.
        tensor: one of them, as it is read or made.
        is_sum: whether the operations make what adds up to it; else they read it.
        times: how many such tensors there are in a step.
        sizes: for each class of the tensors' dims, their sizes along it.
    """

    tie: int
    tensor: int
    is_sum: bool
    times: int
    sizes: dict[int, set[int]]


@dataclass(frozen=True)
class Sharing:
    """What is shared in a step.

    Attributes:
        elements: what stands between tensors and operations.
        of: for an operation and the place of a tensor among its dims, the number of the element.
    """

    elements: tuple[Shared, ...]
    of: dict[tuple[int, int], int]


# An operation, the place of a tensor among its dims, and the tensor.
_Use = tuple[int, int, int]


def sharing(groups: Groups) -> Sharing:
    """What several operations of a step read, or make together."""
    uses: dict[tuple[bool, Hashable], list[_Use]] = {}
    for use, is_result in _uses(groups):
        key = is_result, _key(groups, use, is_result=is_result)
        uses.setdefault(key, []).append(use)
    kinds: dict[Hashable, list[tuple[bool, list[_Use]]]] = {}
    for (is_sum, _), found in uses.items():
        if len({i for i, _, _ in found}) > 1:
            kinds.setdefault(_kind(groups, is_sum, found), []).append((is_sum, found))
    elements: list[Shared] = []
    of: dict[tuple[int, int], int] = {}
    for number, alike in enumerate(kinds.values()):
        is_sum, found = alike[0]
        sizes: dict[int, set[int]] = {}
        for _, _, t in found:
            for d, size in enumerate(groups.step.tensors[t].spec.shape):
                if (t, d) in groups.tensor_class:
                    sizes.setdefault(groups.tensor_class[t, d], set()).add(size)
        tensor = found[0][2]
        tie = groups.tie[groups.of_tensor[tensor]]
        times = sum(groups.step.operations[uses[0][0]].times for _, uses in alike)
        elements.append(Shared(tie, tensor, is_sum, times, sizes))
        of |= {(i, place): number for _, found in alike for i, place, _ in found}
    return Sharing(tuple(elements), of)


def _key(groups: Groups, use: _Use, *, is_result: bool) -> Hashable:
    """Uses of one key share a collective.

    What is read in the forward is not kept for a backward that computes again.
    """
    step = groups.step
    number, _, tensor = use
    if is_result:
        return step.totals[tensor][0]
    origin = step.operations[number].origin
    is_again = step.recomputes and origin is not None and origin.phase is not Phase.FORWARD
    return _viewed(groups, tensor), step.tensors[tensor].spec.dtype, is_again


def _kind(groups: Groups, is_sum: bool, found: list[_Use]) -> Hashable:
    """What decides an element's costs: those of equal kinds get one choice."""
    around = {
        (groups.tie[groups.of_operation[i]], id(groups.step.operations[i].entry), place)
        for i, place, _ in found
    }
    tensor = found[0][2]
    return (
        groups.tie[groups.of_tensor[tensor]],
        id(groups.step.tensors[tensor].spec),
        is_sum,
        frozenset(around),
    )


def _uses(groups: Groups) -> Iterator[tuple[_Use, bool]]:
    """The tensors of other groups that operations read or make; whether they make them."""
    for i, operation in enumerate(groups.step.operations):
        for place, (t, dims) in enumerate(operation.dims):
            if dims and groups.of_tensor[t] != groups.of_operation[i]:
                yield (i, place, t), place >= len(operation.operands)


def _viewed(groups: Groups, tensor: int) -> int:
    """The tensor of the same group that a tensor is a view or a cast of; itself if it is none."""
    step = groups.step
    while True:
        maker = step.makers[tensor]
        if maker is None or groups.of_operation[maker] != groups.of_tensor[tensor]:
            return tensor
        viewed = step.operations[maker].viewed
        if viewed is None:
            return tensor
        tensor = viewed
