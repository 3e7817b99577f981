"""Which pure jax function computes which ATen overload. Every family file registers here; the lowering looks up here.

A lowering takes a `Context` and the overload's own arguments and returns one array, or a tuple with one array per tensor result:

- a Tensor arrives as a jax array of the tensor's exact shape and dtype; `Tensor[]` as a list; an absent optional as None;
- a `Scalar` of the schema arrives as a `Number`, whose value is a traced input of the program, so that a learning rate or a bias
  correction never causes a compile; the arguments named in `static` arrive as plain Python numbers instead and become part of the key;
- everything else (ints, sizes, dtypes, strings) arrives as torch passes it.

The results must have exactly the shapes and dtypes of `ctx.outs`, which come from torch's meta kernels; the driver checks that.
Lowerings only ever see functional overloads: in-place, `out=` and foreach forms are derived from the schema.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd_core import dtypes


@dataclass(frozen=True)
class Number:
    """A Python number of the program: `value` is a 0-dim array (float64, int64, bool or complex128), `kind` its Python type."""

    value: jax.Array
    kind: type

    def astype(self, dtype: np.dtype) -> jax.Array:
        return self.value.astype(dtype)


@dataclass(frozen=True)
class Out:
    """What torch says of one result: its shape and its torch dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Context:
    """What a lowering may know beside its arguments."""

    outs: tuple[Out, ...]
    platform: str  # "cpu", "gpu" or "tpu"
    key: jax.Array | None = None  # a jax PRNG key, for overloads registered with random=True
    num_devices: int = 1  # over which the program is partitioned
    split_dims: frozenset[int] = (
        frozenset()
    )  # which dims anything in the program is said to split, counted from the last one (-1)
    # (x, n) -> x with its last n dims whole on each device, the others as the partitioner likes
    keep_whole: Callable[[jax.Array, int], jax.Array] = lambda x, n: x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.outs[0].shape

    @property
    def dtype(self) -> np.dtype:
        """The jax dtype of the first result."""
        return dtypes.to_jax(self.outs[0].dtype)


@dataclass(frozen=True)
class Lowering:
    """One registered overload."""

    overload: torch._ops.OpOverload
    function: Callable[..., Any]
    static: frozenset[str] = field(default_factory=frozenset)
    random: bool = False
    # (args, kwargs, platform) -> whether this call must run on the host
    host_when: Callable[[Any, Any, str], bool] | None = None
    # in place of torch's meta kernel: the overload over meta tensors
    meta: Callable[..., Any] | None = None
    numbers: frozenset[str] = field(default_factory=frozenset)


_LOWERINGS: dict[torch._ops.OpOverload, Lowering] = {}
# For a view overload: (new value of the view, old value of the base, the view's static arguments) -> new value of the base.
_VIEW_WRITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def resolve(name: str) -> torch._ops.OpOverload:
    """The overload that `"aten.add.Tensor"` names. Raises ValueError for a packet (no overload part) or an unknown name."""
    parts = name.split(".")
    if len(parts) != 3:
        raise ValueError(
            f"a lowering is registered on one exact overload, namespace.op.overload; got {name!r}. Write for instance aten.add.Tensor."
        )
    namespace, op, overload = parts
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError:
        raise ValueError(
            f"this torch has no overload {name!r}; list them with torch.ops.{namespace}.{op}.overloads()."
        ) from None


def lowering(
    *names: str,
    static: tuple[str, ...] = (),
    random: bool = False,
    host_when: Callable[[Any, Any, str], bool] | None = None,
    meta: Callable[..., Any] | None = None,
    numbers: tuple[str, ...] = (),
    since: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function for each overload in `names`. Registering one overload twice is a ValueError.

    `numbers` names keyword arguments of schema type `float` that arrive as `Number` too, where they change from call to call.

    `host_when(args, kwargs, platform)` says which of the recorded calls the function declines on a
    platform ("cpu", "gpu" or "tpu"): those run on the host, counted.
    `since` is the version of torch that brought the overloads, where we support older ones: there the function is not registered.
    `meta` gives the results' shapes and dtypes as meta tensors, where torch has no meta kernel or one that asks what only CUDA's kernel needs.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if since and torch.torch_version.TorchVersion(torch.__version__) < since:
            return function
        for name in names:
            overload = resolve(name)
            if overload in _LOWERINGS:
                raise ValueError(
                    f"{name} already has a lowering, in {_LOWERINGS[overload].function.__module__}; an overload is lowered in one place."
                )
            _LOWERINGS[overload] = Lowering(
                overload, function, frozenset(static), random, host_when, meta, frozenset(numbers)
            )
        return function

    return register


def view_write(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how a write through a view changes its base: `function(base, view, *static args) -> new base`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            overload = resolve(name)
            if overload in _VIEW_WRITES:
                raise ValueError(
                    f"{name} already has a view write, in {_VIEW_WRITES[overload].__module__}; register it once."
                )
            _VIEW_WRITES[overload] = function
        return function

    return register


def find(overload: torch._ops.OpOverload) -> Lowering | None:
    """The overload's lowering, or None."""
    return _LOWERINGS.get(overload)


def find_view_write(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """How a write through this view overload changes its base, or None."""
    return _VIEW_WRITES.get(overload)


def registered() -> tuple[Lowering, ...]:
    """Every lowering, in the order of registration."""
    return tuple(_LOWERINGS.values())


def as_array(x: Any, dtype: np.dtype) -> jax.Array:
    """A tensor argument, a `Number` or a Python number as an array of `dtype`; floats become integers by truncation, as in torch."""
    if isinstance(x, Number):
        return x.astype(dtype)
    return jnp.asarray(x).astype(dtype)


def result_dtype(*operands: Any) -> np.dtype:
    """The dtype in which torch computes an elementwise operation of these operands: its own promotion of dtypes, 0-dim tensors and numbers."""
    standins: list[Any] = []
    for x in operands:
        if isinstance(x, Number):
            standins.append(x.kind(1))
        elif isinstance(x, (bool, int, float, complex)):
            standins.append(x)
        elif x is not None:
            standins.append(
                torch.empty((1,) * x.ndim, dtype=dtypes.to_torch(x.dtype), device="meta")
            )
    result = standins[0] if len(standins) == 1 else None
    if isinstance(result, torch.Tensor):
        return dtypes.to_jax(result.dtype)
    # torch.result_type takes two operands; its result is associative only per category, so fold in tensors, 0-dim tensors, then numbers.
    order: dict[str, list[Any]] = {"tensor": [], "scalar": [], "number": []}
    for x in standins:
        kind = "number" if not isinstance(x, torch.Tensor) else ("tensor" if x.dim() else "scalar")
        order[kind].append(x)
    ranked = order["tensor"] + order["scalar"] + order["number"]
    folded = ranked[0]
    for x in ranked[1:]:
        dims = max(y.dim() if isinstance(y, torch.Tensor) else 0 for y in (folded, x))
        folded = torch.empty((1,) * dims, dtype=torch.result_type(folded, x), device="meta")
    return dtypes.to_jax(
        folded.dtype if isinstance(folded, torch.Tensor) else torch.result_type(folded, folded)
    )


def load_all() -> None:
    """Imports every family, so that each registers its lowerings. The families import this module."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
