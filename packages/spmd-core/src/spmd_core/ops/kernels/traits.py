"""Traits: what passes need to know of an operation, declared at its `lowering(traits=...)`.

Passes ask for traits, not for names, so that a new operation is declared in one place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class Elements(IntEnum):
    """Where an operation's results take their elements from. Each kind includes those before it.

    The elements are those of one operand, `Traits.source`, maybe converted to another dtype.
    """

    SAME = 1  # all elements, in the same shape
    RESHAPED = 2  # all elements, in the same row-major order
    PERMUTED = 3  # each element once
    REPEATED = 4  # each element at least once
    BLOCK = 5  # some elements, which are known when the operation is recorded
    CHOSEN = 6  # some elements
    OF_ALL = 7  # some elements of all operands
    NEW = 8  # computed elements


class Parts(IntEnum):
    """How a kernel's results on parts of its operands are parts of its results.

    Each kind includes those before it. A mean has none: it divides by the size of its part.
    """

    NONE = 0
    SUM = 1  # partial sums, if the summed dims are split
    DIMS = 2  # also blocks of results, if other dims of operands are split
    CHUNKS = 3  # also, TPUs compute a large gradient in chunks


class Compared(Enum):
    """What an operation compares exactly. Gradients and users then find its choice by `==`."""

    ELEMENTS = "the elements of an operand; it returns some of them, or their positions"
    ORDER = "the same for a norm, if its `p` or `ord` is infinite"
    OPERANDS = "the elements of two operands"


class Rows(Enum):
    """What an operation does with the rows of a table."""

    READ = "looks up rows of its first operand at the indices in its second operand"
    WRITTEN = "adds the rows of its first operand at the indices in its second operand"


# (arguments by name, as in `Entry.arguments`; the position of a result; its number of elements) ->
# the lowest and the highest integer that it can have; None if not known.
Bounds = Callable[[Mapping[str, Any], int, int], tuple[int, int] | None]


@dataclass(frozen=True)
class Traits:
    """The traits of an operation.

    Attributes:
        elements: where its results take their elements from.
        source: the position of the operand from which `elements` come.
        parts: how it can be computed by parts.
        gradients: for each of torch's first results, the position of the operand whose gradient,
            and so whose dims, it has.
        rows: what it does with the rows of a table; None if it has no table.
        is_product: whether it is a matrix product or similar: it reads materialised operands, so
            that XLA fuses nothing into it.
        images: the positions of the operands, images or their gradients, that windows read or
            whose channels are summed; the kernel may have an `ImageLayout` as its hint.
        compared: what it compares exactly; None for nothing.
        bounds: which integers its results can have; None if nothing is known.
        passes_nan_on: whether a NaN among its operands makes its results NaN in any case, so that
            a maximum inside of it (such as that of a softmax) need not propagate NaN.
        by_item: whether its arguments are lists of tensors, of one length or empty, beside what all
            items share, and each item of its results is computed from the same item of the lists.
        has_seeds: whether its numbers are seeds, which differ between devices in a manual region.
        classes: for a softmax or a loss of classes, the position of the operand that has the
            classes; the kernel may have a `ClassOrder` as its hint.
        fill: the value of each element of its result, whatever its operands hold: a number, or the
            name of the argument that has it; None for an operation that does more.
        right: for a product of two matrices, the position of the second one; the kernel may have a
            `TransposedRight` as its hint.
        query: for an attention, the position of the query, which the key follows; the kernel may
            have an `AttentionLayout` as its hint.
    """

    elements: Elements = Elements.NEW
    source: int = 0
    parts: Parts = Parts.NONE
    gradients: tuple[int, ...] = ()
    rows: Rows | None = None
    is_product: bool = False
    images: tuple[int, ...] = ()
    right: int | None = None
    query: int | None = None
    compared: Compared | None = None
    bounds: Bounds | None = None
    passes_nan_on: bool = False
    by_item: bool = False
    has_seeds: bool = False
    classes: int | None = None
    fill: float | str | None = None


COMPUTED = Traits()
PRODUCT, BY_ITEM = Traits(is_product=True), Traits(by_item=True)
ZEROS, ONES = Traits(fill=0.0), Traits(fill=1.0)
CHOICE, COMPARISON = Traits(compared=Compared.ELEMENTS), Traits(compared=Compared.OPERANDS)
# For operations that only pass on elements of their operand.
SAME, RESHAPED = Traits(Elements.SAME), Traits(Elements.RESHAPED)
PERMUTED, REPEATED = Traits(Elements.PERMUTED), Traits(Elements.REPEATED)
BLOCK, CHOSEN, OF_ALL = Traits(Elements.BLOCK), Traits(Elements.CHOSEN), Traits(Elements.OF_ALL)
