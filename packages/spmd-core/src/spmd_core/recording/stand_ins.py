"""A call of a torch operation over stand-ins for its tensors, on the CPU, and a smaller such call.

Stand-ins have the dtypes, layouts and shared memory of the call's tensors, and values that suit
nearly every operation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from spmd_core.graph.strides import dense_strides
from spmd_core.graph.values import Spec

# Sizes up to this one are not reduced: they are windows, heads or a few channels.
_SMALL_SIZE = 8
# These kernels read rows at pivots, which count from 1: a pivot of 0 reads beyond their memory.
COUNT_FROM_1 = ("linalg_lu_solve", "linalg_ldl_solve", "lu_unpack")
# Dtypes for which the CPU lacks many kernels that other devices have. A missing kernel counts as a
# refusal only if it is missing for the wider dtype, too.
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


@dataclass(frozen=True)
class StandIn:
    """A tensor argument.

    Attributes:
        spec: its shape, strides and dtype.
        memory: the number of the memory that it shares with another argument, or None.
        offset: where it begins in that memory, in elements.
    """

    spec: Spec
    memory: int | None = None
    offset: int = 0


@dataclass(frozen=True)
class Static:
    """Any other argument; compared with its type, as 1, 1.0 and True are equal.

    A scalar input of a program changes from call to call. Unless the answer is to be about its
    value, every such call gets the same value, and the second trial another one.
    """

    kind: type
    value: Any
    is_input: bool = False
    second: Any = None


@dataclass(frozen=True)
class StandInCall:
    """A call over stand-ins: the positional arguments, and the others by name."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def map(self, function: Callable[[Any], Any]) -> "StandInCall":
        """The call with `function` applied to each stand-in and each static argument."""
        return StandInCall(
            self.func,
            tuple(map_leaves(a, function) for a in self.args),
            tuple((name, map_leaves(a, function)) for name, a in self.kwargs),
        )

    def run(self, tensor: Callable[[StandIn], torch.Tensor], *, is_second: bool = False) -> Any:
        """What the overload returns, with `tensor` for each stand-in."""

        def given(a: Any) -> Any:
            if isinstance(a, StandIn):
                return tensor(a)
            return a.second if a.is_input and is_second else a.value

        args = [_as_lists(map_leaves(a, given)) for a in self.args]
        return self.func(*args, **{n: _as_lists(map_leaves(a, given)) for n, a in self.kwargs})

    def stand_ins(self) -> list[StandIn]:
        leaves = (*self.args, *(a for _, a in self.kwargs))
        return [a for a in leaves_of(leaves) if isinstance(a, StandIn)]


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(tree, (list, tuple)):
        for x in tree:
            yield from leaves_of(x)
    else:
        yield tree


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` applied to the leaves of nested lists and tuples, which become tuples."""
    if isinstance(tree, (list, tuple)):
        return tuple(map_leaves(x, function) for x in tree)
    return function(tree)


def _as_lists(tree: Any) -> Any:
    return [_as_lists(x) for x in tree] if isinstance(tree, tuple) else tree


def memory_of(
    call: StandInCall, fill: Callable[[torch.Tensor], object]
) -> Callable[[StandIn], torch.Tensor]:
    """A function that makes a call's stand-ins."""
    shared: dict[int, torch.Tensor] = {}
    for a in call.stand_ins():
        if a.memory is not None:
            reach = a.offset + 1 + sum((n - 1) * s for n, s in zip(a.spec.shape, a.spec.strides))
            num_bytes = -(-max(reach, 1) * a.spec.dtype.itemsize // 16) * 16
            if a.memory not in shared or shared[a.memory].numel() < num_bytes:
                shared[a.memory] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def make(a: StandIn) -> torch.Tensor:
        spec = a.spec
        if a.memory is None:
            made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu")
        else:
            flat = shared[a.memory].view(spec.dtype)
            made = flat.as_strided(spec.shape, spec.strides, a.offset)
        fill(made)
        return made

    return make


def ones_and_zeros(t: torch.Tensor) -> None:
    """Fills with values that serve as weights, and as indices that exist."""
    t.fill_(1 if t.dtype.is_floating_point or t.dtype.is_complex else 0)


def fractions_and_ones(t: torch.Tensor) -> None:
    """Fills with values that serve as invertible matrices, probabilities and divisors."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        t.fill_(0.25)
        if t.dim() > 1:
            t.diagonal(0, -2, -1).fill_(0.75)
    else:
        t.fill_(1)


def with_wider_dtype(a: Any) -> Any:
    """A stand-in or a static argument with the wider dtype of `WIDER` in place of its own."""
    if isinstance(a, StandIn):
        dtype = WIDER.get(a.spec.dtype)
        if dtype is None:
            return a
        return StandIn(Spec.of(a.spec.shape, a.spec.strides, dtype), a.memory, a.offset)
    if a.kind is torch.dtype:
        return Static(a.kind, WIDER.get(a.value, a.value))
    return a


def smaller(call: StandInCall) -> StandInCall | None:
    """The call with each size replaced by a smaller one, the same wherever it occurs.

    None if another number among the arguments may be made from sizes, such as a product.
    """
    sizes = sorted({n for a in call.stand_ins() for n in a.spec.shape if n > _SMALL_SIZE})
    new = {n: _SMALL_SIZE + 2 * i for i, n in enumerate(sizes, 1)}
    if any(abs(a.value) > _SMALL_SIZE and a.value not in new for a in _ints(call)):
        return None
    if any(a.memory is not None for a in call.stand_ins()):
        first: dict[int, StandIn] = {}
        for a in call.stand_ins():
            if a.memory is not None and first.setdefault(a.memory, a) != a:
                return None  # whether they overlap depends on the sizes

    def shrink(a: Any) -> Any:
        if isinstance(a, StandIn):
            shape = tuple(new.get(n, n) for n in a.spec.shape)
            strides = dense_strides(shape, a.spec.shape, a.spec.strides)
            return StandIn(Spec.of(shape, strides, a.spec.dtype), a.memory)
        return Static(int, new.get(a.value, a.value)) if _is_static_int(a) else a

    return call.map(shrink)


def _ints(call: StandInCall) -> Iterator[Static]:
    leaves = (*call.args, *(a for _, a in call.kwargs))
    return (a for a in leaves_of(leaves) if _is_static_int(a))


def _is_static_int(a: Any) -> bool:
    return isinstance(a, Static) and a.kind is int and not a.is_input
