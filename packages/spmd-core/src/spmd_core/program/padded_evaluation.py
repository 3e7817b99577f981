"""Evaluates a function whose sizes grow with one number, on arrays that are padded to a bound.

The function is given by its jaxprs at two values of the number. Its equations are evaluated with
the sizes at the bound, and the number itself is an input. Elements after the actual size are
padding with arbitrary values, and the rule of each primitive keeps them out of the true elements. A
function with a primitive that has no rule is refused, and compiled for each size.

Padding to a few sizes, so that few programs are compiled, is usually called bucketing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from spmd_core.program import padded_regions
from spmd_core.program.affine_sizes import Affine, Fit, GrowthRefusedError, shape_of
from spmd_core.program.merged_dims import uniform_dims, unmerged
from spmd_core.program.padded_arrays import Capacity, Padded, compacted, reshaped
from spmd_core.program.padded_equation import Equation
from spmd_core.program.padded_rules import RULES
from spmd_core.program.safe_forms import called


class Evaluation:
    """The evaluation of one function.

    Args:
        fit: how integers depend on the number.
        capacity: the values of the number for which arrays are padded, and the actual value.
    """

    def __init__(self, fit: Fit, capacity: Capacity) -> None:
        self.fit, self.capacity = fit, capacity

    def results(
        self, first: ClosedJaxpr, second: ClosedJaxpr, inputs: Sequence[Any]
    ) -> list[Padded]:
        """The function's results, padded along each dim of varying size.

        Args:
            first: the function at the first value of the number.
            second: the function at the second value.
            inputs: the arguments, with the shapes at the bound.

        Raises:
            GrowthRefusedError: a primitive has no rule for a dim that grows.
        """
        arguments = []
        for v, w, x in zip(first.jaxpr.invars, second.jaxpr.invars, inputs, strict=True):
            sizes = self.fit.sizes(shape_of(v), shape_of(w))
            assert np.shape(x) == self.capacity.shape(sizes)
            arguments.append(Padded.plain(x, sizes))
        return [compacted(self.capacity, x) for x in self._run(first, second, arguments)]

    def _run(
        self, first: ClosedJaxpr, second: ClosedJaxpr, arguments: Sequence[Padded]
    ) -> list[Padded]:
        a, b = first.jaxpr, second.jaxpr
        values: dict[Any, Padded] = dict(zip(a.invars, arguments, strict=True))
        for var, const, other in zip(a.constvars, first.consts, second.consts):
            if not np.array_equal(np.asarray(const), np.asarray(other)):
                raise GrowthRefusedError("a constant array depends on the size")
            values[var] = Padded.plain(const, np.shape(const))
        outer = source_info_util.current_name_stack()
        for e, f in zip(a.eqns, b.eqns, strict=True):
            read = [self._read(x, y, values) for x, y in zip(e.invars, f.invars)]
            with source_info_util.set_name_stack(outer + e.source_info.name_stack):
                values.update(zip(e.outvars, self._equation(e, f, read)))
        return [self._read(x, y, values) for x, y in zip(a.outvars, b.outvars)]

    def _read(self, first: Any, second: Any, values: dict[Any, Padded]) -> Padded:
        if not isinstance(first, Literal):
            return values[first]
        a, b = np.asarray(first.val), np.asarray(second.val)
        if a.shape == b.shape and a.tobytes() == b.tobytes():
            return Padded.plain(first.val, a.shape)
        if a.dtype.kind in "iu":
            size = self.fit.size(int(a), int(b))
            return Padded.plain(self.capacity.value(size, a.dtype), ())
        size, inverse = self.fit.literal(float(a), float(b))
        value = self.capacity.value(size, np.dtype(np.float64))
        return Padded.plain((1 / value if inverse else value).astype(a.dtype), ())

    def _equation(self, first: JaxprEqn, second: JaxprEqn, read: list[Padded]) -> list[Padded]:
        inner, other = called(first), called(second)
        if inner is not None and other is not None:
            return self._run(inner, other, read)
        outs = [
            self.fit.sizes(shape_of(v), shape_of(w)) for v, w in zip(first.outvars, second.outvars)
        ]
        equation = Equation(
            first.primitive, first.params, second.params, read, outs, self.capacity, self.fit
        )
        grows = any(x.growing for x in read) or any(
            isinstance(size, Affine) for sizes in outs for size in sizes
        )
        if not grows and equation.is_fixed():
            # The parameters of a shard_map, such as a mark along one axis, contain a function,
            # which some releases of jax return separately.
            found = first.primitive.get_bind_params(first.params)
            functions, params = found if isinstance(found, tuple) else ((), found)
            results = first.primitive.bind(*functions, *(x.array for x in read), **params)
            arrays = results if first.primitive.multiple_results else [results]
            return [Padded.plain(x, sizes) for x, sizes in zip(arrays, outs, strict=True)]
        if equation.name == "shard_map":
            return padded_regions.evaluated(
                first,
                second,
                read,
                fit=self.fit,
                capacity=self.capacity,
                run=lambda *x: Evaluation(self.fit, x[3])._run(*x[:3]),
            )
        if equation.name == "reshape":
            return [reshaped(self.capacity, read[0], outs[0])]
        rule = RULES.get(equation.name)
        if rule is None:
            raise GrowthRefusedError(f"{equation.name} has no rule for growing sizes")
        uniform = uniform_dims(equation)
        flat, factors = unmerged(equation)
        made = []
        for x, sizes, own in zip(rule(flat), outs, factors, strict=True):
            if np.shape(x) != self.capacity.shape(size for dim in own for size in dim):
                raise GrowthRefusedError(f"{equation.name} does not grow as its sizes do")
            made.append(Padded(x, sizes, own, uniform))
        return made
