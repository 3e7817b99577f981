"""Fits each integer of two traces of a function as slope * n + offset.

A function that is traced for two values of a number n gives two jaxprs that differ in integers
alone: sizes, positions, literals. Each of them is fitted as an affine function of n (`Affine`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from spmd_core.program.safe_forms import called


class GrowthRefusedError(Exception):
    """Why a function cannot be evaluated on padded arrays."""


@dataclass(frozen=True)
class Affine:
    """An integer that depends on the number: slope * number + offset."""

    slope: int
    offset: int

    def at(self, number: Any) -> Any:
        return self.slope * number + self.offset


Size = int | Affine
Sizes = tuple[Size, ...]


def times(size: Size, by: int) -> Size:
    """The product of a size and an integer."""
    return size * by if isinstance(size, int) else Affine(size.slope * by, size.offset * by)


def quotient(size: Size, by: Size) -> Size | None:
    """The size whose product with `by` is `size`; None if there is none."""
    if size == by:
        return 1
    if isinstance(by, int):
        if isinstance(size, int):
            return None if size % by else size // by
        if size.slope % by or size.offset % by:
            return None
        return Affine(size.slope // by, size.offset // by)
    if isinstance(size, int) or size.slope % by.slope:
        return None
    factor = size.slope // by.slope
    return factor if times(by, factor) == size else None


@dataclass(frozen=True)
class Fit:
    """The two values of the number at which integers are fitted.

    Attributes:
        first: one value.
        second: another value, greater or smaller.
        shrinking: the functions of negative slope that are known to hold for every value. Others
            are refused, as they may be the padding to a multiple of something.
    """

    first: int
    second: int
    shrinking: frozenset[Affine] = frozenset()

    def size(self, first: int, second: int) -> Size:
        """The fit of an integer that is `first` at the first value, and `second` at the second."""
        if first == second:
            return int(first)
        slope, rest = divmod(int(second) - int(first), self.second - self.first)
        found = Affine(slope, int(first) - slope * self.first)
        if rest or (slope < 0 and found not in self.shrinking):
            raise GrowthRefusedError(
                f"a size is {first} at {self.first}, {second} at {self.second}"
            )
        return found

    def literal(self, first: float, second: float) -> tuple[Size, bool]:
        """A float literal as a fitted integer, and whether the literal is its reciprocal."""
        if first.is_integer() and second.is_integer():
            return self.size(int(first), int(second)), False
        if first and second:
            a, b = 1 / first, 1 / second
            if math.isclose(a, round(a), rel_tol=1e-6) and math.isclose(b, round(b), rel_tol=1e-6):
                return self.size(round(a), round(b)), True
        raise GrowthRefusedError(f"a number is {first} at {self.first}, {second} at {self.second}")

    def sizes(self, first: Sequence[int], second: Sequence[int]) -> Sizes:
        """The fitted sizes of an array, from its shapes at both values.

        An array that shrinks is refused: at the bound it has fewer elements than at the number.
        """
        found = tuple(self.size(a, b) for a, b in zip(first, second, strict=True))
        if any(isinstance(size, Affine) and size.slope < 0 for size in found):
            raise GrowthRefusedError("an array shrinks")
        return found


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable of a jaxpr."""
    shape: tuple[int, ...] = atom.aval.shape
    return shape


def growing_arrays(
    fit: Fit, first: ClosedJaxpr, second: ClosedJaxpr
) -> Iterator[tuple[Sizes, int]]:
    """The sizes of all growing arrays in a function, with their bytes per element.

    Args:
        fit: how integers depend on the number.
        first: the function at the first value of the number.
        second: the function at the second value.
    """
    pairs = list(zip(first.jaxpr.invars, second.jaxpr.invars, strict=True))
    for e, f in zip(first.jaxpr.eqns, second.jaxpr.eqns, strict=True):
        inner, other = called(e), called(f)
        if inner is not None and other is not None:
            yield from growing_arrays(fit, inner, other)
        pairs += zip(e.outvars, f.outvars, strict=True)
    for v, w in pairs:
        sizes = fit.sizes(shape_of(v), shape_of(w))
        if any(isinstance(size, Affine) for size in sizes):
            yield sizes, v.aval.dtype.itemsize


@dataclass
class Form:
    """A jaxpr without its integers: equal for functions that do the same at different sizes.

    Attributes:
        skeleton: everything but the numbers.
        ints: the integers, in the order of traversal.
        floats: the values of floating-point literals.
    """

    skeleton: list[Any] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)

    @staticmethod
    def of(closed: ClosedJaxpr) -> "Form":
        form = Form()
        form._add_function(closed.jaxpr, closed.consts, {})
        return form

    def _add_function(self, jaxpr: Jaxpr, consts: Sequence[Any], number_of: dict[Any, int]) -> None:
        for const in consts:
            self._add_array(const)
        for var in (*jaxpr.constvars, *jaxpr.invars):
            number_of[var] = len(number_of)
            self._add_aval(var)
        for eqn in jaxpr.eqns:
            self.skeleton.append(eqn.primitive)
            for atom in eqn.invars:
                self._add_atom(atom, number_of)
            inner = called(eqn)
            if inner is not None:
                self._add_function(inner.jaxpr, inner.consts, {})
            else:
                for name, value in eqn.params.items():
                    self.skeleton.append(name)
                    self.add_param(value)
            for var in eqn.outvars:
                number_of[var] = len(number_of)
                self._add_aval(var)
        for atom in jaxpr.outvars:
            self._add_atom(atom, number_of)

    def _add_aval(self, atom: Any) -> None:
        shape = shape_of(atom)
        self.skeleton += [atom.aval.dtype, len(shape)]
        self.ints += shape

    def _add_atom(self, atom: Any, number_of: dict[Any, int]) -> None:
        if not isinstance(atom, Literal):
            self.skeleton.append(number_of[atom])
        else:
            self._add_aval(atom)
            self._add_array(atom.val)

    def _add_array(self, value: Any) -> None:
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "iu":
            self.ints.append(int(array))
        elif array.ndim == 0 and array.dtype.kind == "f":
            self.floats.append(float(array))
        else:
            self.skeleton += [array.shape, array.dtype, array.tobytes()]

    def add_param(self, value: Any) -> None:
        if isinstance(value, (bool, np.bool_)) or value is None:
            self.skeleton.append(value)
        elif isinstance(value, (int, np.integer)):
            self.ints.append(int(value))
        elif isinstance(value, (tuple, list)):
            self.skeleton += [type(value), len(value)]
            for item in value:
                self.add_param(item)
        elif isinstance(value, ClosedJaxpr):
            self._add_function(value.jaxpr, value.consts, {})
        elif isinstance(value, Jaxpr):
            self._add_function(value, (), {})
        elif isinstance(value, (np.ndarray, jax.Array)):
            self._add_array(value)
        else:
            self.skeleton.append(value)

    def agrees(self, other: "Form") -> bool:
        """Whether the two forms differ in numbers alone."""
        return (
            self.skeleton == other.skeleton
            and len(self.ints) == len(other.ints)
            and len(self.floats) == len(other.floats)
        )

    def predicts(self, second: "Form", fit: Fit, third: "Form", number: int) -> bool:
        """Whether a third form has the numbers that the fit of this one and the second predicts."""
        if not self.agrees(third):
            return False
        for a, b, c in zip(self.ints, second.ints, third.ints):
            size = fit.size(a, b)
            if (size.at(number) if isinstance(size, Affine) else size) != c:
                return False
        for x, y, z in zip(self.floats, second.floats, third.floats):
            if x == y or (x != x and y != y):
                if z != x and z == z:
                    return False
            else:
                fitted, is_inverse = fit.literal(x, y)
                value = float(fitted.at(number) if isinstance(fitted, Affine) else fitted)
                if not math.isclose(1 / value if is_inverse else value, z, rel_tol=1e-6):
                    return False
        return True
