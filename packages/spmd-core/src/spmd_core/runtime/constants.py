"""Makes device arrays of one number each, such as the zeros with which an optimizer begins."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from spmd_core import dtypes
from spmd_core.runtime import abstract
from spmd_core.runtime.jax_sharding import device_ids_of

# A smaller array is sent, which needs no program.
_SENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Form:
    """What arrays of one number may differ in beside their number.

    Attributes:
        shape: with the padding of uneven shards.
        dtype: numpy's.
        jax_sharding: where the array lies.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    jax_sharding: jax.sharding.NamedSharding


@dataclass(frozen=True)
class Constant:
    """An array of one number.

    Attributes:
        number: 0-dim, on the CPU.
        shape: of the array, with the padding of uneven shards.
        jax_sharding: of the array.
    """

    number: torch.Tensor
    shape: tuple[int, ...]
    jax_sharding: jax.sharding.NamedSharding

    @property
    def form(self) -> Form:
        """The array's form."""
        return Form(self.shape, dtypes.to_jax(self.number.dtype), self.jax_sharding)


def arrays_of(constants: Sequence[Constant]) -> list[jax.Array]:
    """The arrays, in memory of their own. Neither host nor device holds more than shards.

    Does not wait. A program makes a large array of each form at once, and runs again for the second
    arrays of these forms: both moments of all weights take one compilation, not one for each form.
    """
    if abstract.run() is not None:
        forms = [constant.form for constant in constants]
        return [abstract.array(x.shape, x.dtype, x.jax_sharding) for x in forms]
    arrays: dict[int, jax.Array] = {}
    # By devices and form, the positions of the arrays that programs make.
    wanted: dict[tuple[int, ...], dict[Form, list[int]]] = {}
    with jax.enable_x64(True):
        for position, constant in enumerate(constants):
            form = constant.form
            if math.prod(form.shape) * form.dtype.itemsize <= _SENT_BYTES:
                arrays[position] = _sent(form, constant.number)
            else:
                on = wanted.setdefault(device_ids_of(form.jax_sharding), {})
                on.setdefault(form, []).append(position)
        for by_form in wanted.values():
            while by_form:
                now = [positions.pop() for positions in by_form.values()]
                values = [dtypes.numpy_view(constants[i].number) for i in now]
                arrays.update(zip(now, _program(tuple(by_form))(*values)))
                by_form = {form: positions for form, positions in by_form.items() if positions}
    return [arrays[position] for position in range(len(constants))]


def _sent(form: Form, number: torch.Tensor) -> jax.Array:
    value, sharding = dtypes.numpy_view(number), form.jax_sharding
    if sharding.is_fully_addressable and sharding.is_fully_replicated:
        return jax.device_put(np.full(form.shape, value), sharding)
    shard = sharding.shard_shape(form.shape)
    return jax.make_array_from_callback(form.shape, sharding, lambda _: np.full(shard, value))


@functools.lru_cache(maxsize=1024)
def _program(forms: tuple[Form, ...]) -> Any:
    """The program that makes an array of each form from its number."""
    shapes = [form.shape for form in forms]
    return jax.jit(
        lambda *values: [jax.numpy.broadcast_to(x, shape) for x, shape in zip(values, shapes)],
        out_shardings=[form.jax_sharding for form in forms],
    )
