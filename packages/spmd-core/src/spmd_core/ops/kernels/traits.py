"""Traits: what passes need to know of an operation, written at its `lowering(traits=...)`.

A pass asks for a trait, not for names: a new operation says what it is in its own block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class Elements(IntEnum):
    """Whose elements the results of an operation have. Each kind includes those before it.

    They are elements of one operand, `Traits.source`, converted where a result has another dtype.
    """

    SAME = 1  # all of them, in the same shape
    RESHAPED = 2  # in the same row-major order
    PERMUTED = 3  # each once
    REPEATED = 4  # each at least once
    BLOCK = 5  # no others; which ones is known when the operation is recorded
    CHOSEN = 6  # no others
    OF_ALL = 7  # no others than those of all operands
    NEW = 8  # computed


class Parts(IntEnum):
    """What a kernel computes from parts of its operands. Each kind includes those before it.

    A mean computes none: it divides by the size that it sees.
    """

    NONE = 0
    SUM = 1  # a part of each sum
    DIMS = 2  # and of those dims of a result that are dims of operands
    PIECES = 3  # and a TPU makes a large gradient in pieces


class Compared(Enum):
    """What an operation compares exactly. Gradients and users look for what it chose by `==`."""

    ELEMENTS = "the elements of an operand, of which its results are some, or their positions"
    ORDER = "the same, if its `p` or `ord` is infinite: a norm"
    OPERANDS = "the elements of two operands"


class Rows(Enum):
    """What an operation does with the rows of a table. Devices send rows, or parts of the table."""

    READ = "looks up those that its second operand has, in its first operand"
    WRITTEN = "adds to those that its second operand has, what its first operand has"


# A call's arguments by name, as `Entry.arguments` has them, the position of a result and its number
# of elements -> the lowest and the highest integer that can be in it; None if that is not known.
Bounds = Callable[[Mapping[str, Any], int, int], tuple[int, int] | None]


@dataclass(frozen=True)
class Traits:
    """What an operation is.

    Attributes:
        elements: whose elements its results have.
        source: the position of the operand that `elements` speaks of.
        parts: what its kernel computes from parts of its operands.
        gradients: for each of torch's first results the position of the operand whose gradient it
            is: it has that operand's dims.
        rows: what it does with the rows of a table; None if it has no table.
        is_product: whether it is a product of matrices or the like: it reads its operands from
            memory, so that XLA fuses nothing into it.
        images: the positions of the operands that are images or their gradients, of which windows
            read; the kernel may ask for their `ImageLayout`.
        compared: what it compares exactly; None for nothing.
        bounds: what integers its results can have; None if that is not known of any.
        passes_nan_on: whether a NaN among its operands makes its results NaN, whatever maximum it
            takes of them, as of what it takes exponentials of.
        has_seeds: whether its numbers are seeds, of which devices get different ones in a manual
            region.
        query: of an attention, the position of the query, behind which the key is; the kernel may
            ask for their `AttentionLayout`.
    """

    elements: Elements = Elements.NEW
    source: int = 0
    parts: Parts = Parts.NONE
    gradients: tuple[int, ...] = ()
    rows: Rows | None = None
    is_product: bool = False
    images: tuple[int, ...] = ()
    query: int | None = None
    compared: Compared | None = None
    bounds: Bounds | None = None
    passes_nan_on: bool = False
    has_seeds: bool = False


COMPUTED = Traits()
PRODUCT = Traits(is_product=True)
CHOICE, COMPARISON = Traits(compared=Compared.ELEMENTS), Traits(compared=Compared.OPERANDS)
# Of operations that only pass on their operand's elements.
SAME, RESHAPED = Traits(Elements.SAME), Traits(Elements.RESHAPED)
PERMUTED, REPEATED = Traits(Elements.PERMUTED), Traits(Elements.REPEATED)
BLOCK, CHOSEN, OF_ALL = Traits(Elements.BLOCK), Traits(Elements.CHOSEN), Traits(Elements.OF_ALL)
