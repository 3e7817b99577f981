"""The table from ATen overloads to the pure jax functions that compute them.

Every family file registers its lowerings here; `find_lowering` looks them up. A lowering takes a
`Context` and the overload's own arguments. It returns one array, or a tuple with one array for each
tensor result. Its arguments:

- a Tensor is a jax array of the tensor's exact shape and dtype; a `Tensor[]` is a list of them; an
  absent optional is None;
- a `Scalar` of the schema is a `Number`, whose value is a traced input of the program, so that a
  new learning rate or bias correction never causes a compile; the arguments named in `static` are
  plain Python numbers instead, and part of the program's key;
- everything else (ints, sizes, dtypes, strings) is what torch passes.

The results must have exactly the shapes and dtypes of `ctx.outs`, which come from torch's meta
kernels; the caller checks that. Lowerings only see functional overloads: in-place, `out=` and
foreach forms are derived from the schema.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import flop_counter

from spmd_core import dtypes, releases
from spmd_core.ops.kernels.booleans import cast
from spmd_core.ops.kernels.traits import COMPUTED, Traits


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "float32"], meta_fields=["kind"]
)
@dataclass(frozen=True)
class Number:
    """A Python number as an input of the program. It is a tree of arrays.

    Attributes:
        value: a 0-dim array: float64, int64, bool or complex128.
        kind: its Python type.
        float32: the same number in float32, where the program has it already; None where it has
            not.
    """

    value: jax.Array
    kind: type
    float32: jax.Array | None = None

    def astype(self, dtype: np.dtype) -> jax.Array:
        """The number in a dtype, as jax converts it."""
        if self.float32 is not None and dtype == np.float32:
            return self.float32
        return self.value.astype(dtype)


@dataclass(frozen=True)
class Out:
    """The shape and the torch dtype of one result, as torch gives them."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ImageLayout:
    """How the images that an operation's windows or sums read are split.

    Attributes:
        mesh: the program's mesh.
        axes: for each dim of the images, the axes that split it, the major one first.
    """

    mesh: jax.sharding.Mesh
    axes: tuple[tuple[str, ...], ...]

    def num_parts(self, dim: int) -> int:
        """The number of parts into which a dim of the images is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes[dim])


@dataclass(frozen=True)
class AttentionLayout:
    """How mesh axes split the dims of an attention.

    Attributes:
        mesh: the program's mesh.
        batch: the axes that split the first dim, if there is one before the heads.
        heads: the axes that split the kv heads.
        rows: the axes that split both sequences, in the order of the mesh.
    """

    mesh: jax.sharding.Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def count(self, axes: Iterable[str]) -> int:
        """The number of positions along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


@dataclass(frozen=True)
class TableLayout:
    """How the table of a lookup is split by its rows, and how the indices are split.

    Attributes:
        mesh: the program's mesh.
        rows: the axes that split the rows, the major one first.
        indices: for each of the first dims of the indices, the axes that split it.
        shared: the axis that splits both the rows and the first dim of the indices.
        gathers: whether to gather the table along `shared`: because it has fewer rows than the
            devices look up, or because another operation gathers it anyway.
        scatter: inside a manual region, a reduce-scatter of the first dim along `shared`.
    """

    mesh: jax.sharding.Mesh
    rows: tuple[str, ...]
    indices: tuple[tuple[str, ...], ...]
    shared: str
    gathers: bool
    scatter: Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class ClassOrder:
    """The classes of a softmax or of a loss lie next to each other in memory.

    Attributes:
        dim: the dim of the classes, which is not the last one.
    """

    dim: int


@dataclass(frozen=True)
class TransposedRight:
    """The second matrix of a product is given as its transpose."""


# A layout that the kernel of an operation may need to choose its form.
Hint = ImageLayout | AttentionLayout | TableLayout | ClassOrder | TransposedRight


@dataclass(frozen=True)
class BatchSplit:
    """How mesh axes split the first dim of a program's data.

    Attributes:
        count: the number of parts; 1 if the dim is not split, or that is not known.
        split: splits the first dim of an array by these axes; the partitioner chooses the others.
    """

    count: int = 1
    split: Callable[[jax.Array], jax.Array] = lambda x: x


H = TypeVar("H", ImageLayout, AttentionLayout, TableLayout, ClassOrder, TransposedRight)


@dataclass
class Context:
    """What a lowering may use besides its arguments."""

    outs: tuple[Out, ...]
    platform: str  # "cpu", "gpu" or "tpu"
    key: jax.Array | None = None  # a jax PRNG key, for overloads registered with random=True
    num_devices: int = 1  # the number of devices over which the program is partitioned
    # the dims that any sharding in the program splits, counted from the last dim (-1)
    split_dims: frozenset[int] = frozenset()
    # (x, n) -> x with its last n dims replicated; the partitioner chooses the others
    replicate_last_dims: Callable[[jax.Array, int], jax.Array] = lambda x, n: x
    # the layout of the operation's operands, if a pass found one
    hint: Hint | None = None
    # how the batch of the program's data is split
    batch: BatchSplit = field(default_factory=BatchSplit)

    def on_one_device(self) -> "Context":
        """The context inside a manual region, where every device runs the kernel by itself."""
        return Context(self.outs, self.platform)

    def layout(self, kind: type[H]) -> H | None:
        """The operation's hint, if it is of this kind."""
        return self.hint if isinstance(self.hint, kind) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.outs[0].shape

    @property
    def dtype(self) -> np.dtype:
        """The jax dtype of the first result."""
        return dtypes.to_jax(self.outs[0].dtype)


@dataclass(frozen=True)
class IndexRule:
    """The indices that an argument of a call may hold, by the rule of eager torch.

    Attributes:
        argument: the argument's name.
        low: the lowest index.
        high: the highest index.
        item: the position in the argument, if that is a list of tensors.
        skip: an index outside of these that stands for none, such as a loss's `ignore_index`.
    """

    argument: str
    low: int
    high: int
    item: int | None = None
    skip: int | None = None


# A call's arguments by name, those that were left out included, with a spec for each tensor -> what
# its indices may be.
IndexRules = Callable[[Mapping[str, Any]], Iterable[IndexRule]]


@dataclass(frozen=True)
class Lowering:
    """One registered overload."""

    overload: torch._ops.OpOverload
    function: Callable[..., Any]
    static: frozenset[str] = field(default_factory=frozenset)
    random: bool = False
    # (args, kwargs, platform) -> whether this call must run on the host
    host_when: Callable[[Any, Any, str], bool] | None = None
    # the overload over meta tensors, instead of torch's meta kernel
    meta: Callable[..., Any] | None = None
    numbers: frozenset[str] = field(default_factory=frozenset)
    indices: IndexRules | None = None
    traits: Traits = COMPUTED


# Guarded by: imports. Cleared by: never.
_LOWERINGS: dict[torch._ops.OpOverload, Lowering] = {}
# For a view overload: (old value of the base, new value of the view, the view's static arguments)
# -> new value of the base.
# Guarded by: imports. Cleared by: never.
_VIEW_WRITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def resolve(name: str) -> torch._ops.OpOverload:
    """The overload that a name such as `"aten.add.Tensor"` stands for.

    Raises ValueError for a packet (a name without the overload part) and for an unknown name.
    """
    found = releases.overload(name)
    if found is None:
        packet = name.rpartition(".")[0]
        raise ValueError(
            f"an overload must exist to be called; got {name!r}, which torch {torch.__version__} "
            f"lacks. List those that it has with torch.ops.{packet}.overloads()."
        )
    return found


def flop_formula(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Has `torch.utils.flop_counter` count an operation, such as `"aten.linear"`.

    The formula takes the call's arguments, with the shapes of tensors in their place. A formula
    that this torch has itself stays.
    """
    namespace, operation = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operation)

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        if packet not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(packet)(formula)
        return formula

    return register


def _present(names: Sequence[str]) -> list[tuple[str, torch._ops.OpOverload]]:
    found = [(name, releases.overload(name)) for name in names]
    return [(name, overload) for name, overload in found if overload is not None]


def lowering(
    *names: str,
    static: tuple[str, ...] = (),
    random: bool = False,
    host_when: Callable[[Any, Any, str], bool] | None = None,
    meta: Callable[..., Any] | None = None,
    numbers: tuple[str, ...] = (),
    indices: IndexRules | None = None,
    traits: Traits = COMPUTED,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function for each overload in `names` that this torch has.

    Raises ValueError where an overload already has a lowering.

    Args:
        names: the overloads, as `resolve` takes them. `releases` lists those that are absent.
        static: the arguments of schema type `Scalar` that are plain Python numbers, part of the
            program's key, and not `Number`.
        random: whether the function needs `ctx.key`.
        host_when: `host_when(args, kwargs, platform)` is True for the recorded calls that the
            function does not support on the platform ("cpu", "gpu" or "tpu"). Those run on the
            host, and are counted.
        meta: gives the results' shapes and dtypes as meta tensors, where torch has no meta kernel
            or has one with requirements that only CUDA's kernel has.
        numbers: the keyword arguments of schema type `float` that arrive as `Number` too, because
            they change from call to call.
        indices: which indices eager torch accepts, where it refuses others. Programs check them
            (`config.check_indices`).
        traits: what passes need to know of the operation.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, overload in _present(names):
            if overload in _LOWERINGS:
                raise ValueError(
                    f"{name} already has a lowering, in "
                    f"{_LOWERINGS[overload].function.__module__}; an overload is lowered in one "
                    "place."
                )
            _LOWERINGS[overload] = Lowering(
                overload,
                function,
                frozenset(static),
                random,
                host_when,
                meta,
                frozenset(numbers),
                indices,
                traits,
            )
        return function

    return register


def view_write(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how a write through a view changes its base.

    The decorated function is `function(base, view, *static_args) -> new base`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, overload in _present(names):
            if overload in _VIEW_WRITES:
                raise ValueError(
                    f"{name} already has a view write, in "
                    f"{_VIEW_WRITES[overload].__module__}; register it once."
                )
            _VIEW_WRITES[overload] = function
        return function

    return register


def find_lowering(overload: torch._ops.OpOverload) -> Lowering | None:
    """The overload's lowering, or None."""
    return _LOWERINGS.get(overload)


@functools.cache
def lowering_named(name: str) -> Lowering:
    """The lowering of an operation by its recorded name, such as `aten::mul.Tensor`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return _LOWERINGS[resolve(f"{namespace}.{packet}.{overload or 'default'}")]


def find_view_write(overload: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The function that `view_write` registered for the view overload, or None."""
    return _VIEW_WRITES.get(overload)


def registered() -> tuple[Lowering, ...]:
    """Every lowering, in the order of registration."""
    return tuple(_LOWERINGS.values())


def as_array(x: Any, dtype: np.dtype) -> jax.Array:
    """A tensor argument, a `Number` or a Python number as an array of `dtype`.

    Floats become integers by truncation, as in torch.
    """
    if isinstance(x, Number):
        return x.astype(dtype)
    return cast(jnp.asarray(x), dtype)


def result_dtype(*operands: Any) -> np.dtype:
    """The dtype in which torch computes an elementwise operation of these operands.

    It is torch's own promotion of tensors, 0-dim tensors and numbers. None operands are skipped.
    """
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
    # torch.result_type takes two operands and is associative only within a category, so the fold
    # takes the tensors first, then the 0-dim tensors, then the numbers.
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
    """Imports every family, which registers its lowerings; the families import this module."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
