"""One equation of a jaxpr on padded arrays, with a `Size` for each integer in its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from spmd_core.program.affine_sizes import Affine, Fit, Form, Sizes
from spmd_core.program.padded_arrays import Capacity, Padded, filled


@dataclass(frozen=True)
class Equation:
    """One equation, on padded arrays.

    Attributes:
        primitive: the primitive.
        first: the parameters at the first value of the number.
        second: the parameters at the second value.
        read: the inputs.
        outs: the sizes of the results.
        capacity: the values of the number for which arrays are padded.
        fit: how integers depend on the number.
        given: parameters, with a `Size` for each integer, that override those of the traces.
    """

    primitive: Primitive
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    read: list[Padded]
    outs: list[Sizes]
    capacity: Capacity
    fit: Fit
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.primitive.name)

    @property
    def arrays(self) -> list[Any]:
        return [x.array for x in self.read]

    def is_fixed(self) -> bool:
        """Whether the parameters do not depend on the number."""
        forms = []
        for params in (self.first, self.second):
            form = Form()
            for name, value in params.items():
                form.skeleton.append(name)
                form.add_param(value)
            forms.append(form)
        return forms[0] == forms[1]

    def param(self, name: str) -> Any:
        """A parameter, with `Size` for each integer."""
        if name in self.given:
            return self.given[name]
        return self._sized(self.first[name], self.second[name])

    def _sized(self, a: Any, b: Any) -> Any:
        if isinstance(a, (bool, np.bool_)):
            return a
        if isinstance(a, (int, np.integer)):
            return self.fit.size(int(a), int(b))
        if isinstance(a, (tuple, list)):
            items = [self._sized(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*items) if hasattr(a, "_fields") else type(a)(items)
        return a

    def with_params(
        self, read: Sequence[Padded], outs: Sequence[Sizes], **params: Any
    ) -> "Equation":
        """The equation with other inputs, result sizes and parameters."""
        return replace(self, read=[*read], outs=[*outs], given={**self.given, **params})

    def bind(self, *arrays: Any, **changed: Any) -> list[Any]:
        """The primitive's results on these arrays, with the parameters at the bound."""
        params = {}
        for name in self.first:
            params[name] = changed[name] if name in changed else self._bound(self.param(name))
        results = self.primitive.bind(*arrays, **params)
        return list(results) if self.primitive.multiple_results else [results]

    def _bound(self, value: Any) -> Any:
        if isinstance(value, Affine):
            return self.capacity.at_bound(value)
        if isinstance(value, (tuple, list)):
            items = [self._bound(x) for x in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def filled(self, x: Padded, dims: set[int], value: Any) -> Any:
        """See `padded_arrays.filled`."""
        return filled(self.capacity, x, dims, value)
