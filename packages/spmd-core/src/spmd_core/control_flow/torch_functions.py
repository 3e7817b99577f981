"""torch's own loops and branches on tensors of the device: `torch.cond`, `torch.while_loop`, scans.

torch compiles their functions first, by Dynamo, to find what they close over. For tensors of the
device they are recorded as `spmd_core.control_flow` records them. So torch's functions are replaced
by ones that choose by their tensors; and its operators, which traced programs call, get
kernels for the device.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._higher_order_ops
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from spmd_core import releases
from spmd_core.control_flow.branches import cond
from spmd_core.control_flow.loops import while_loop
from spmd_core.control_flow.scans import scan
from spmd_core.tensor.sharded_tensor import XLAShardedTensor


def _cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """`torch.cond`; its pred may have one element in any shape."""
    if isinstance(pred, torch.Tensor) and pred.numel() == 1:
        pred = pred.reshape(())
    return cond(pred, true_fn, false_fn, *operands)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """`torch.while_loop`; integers that it carries become tensors."""

    def carried(leaf: Any) -> Any:
        is_integer = isinstance(leaf, int) and not isinstance(leaf, bool)
        return torch.tensor(leaf, device="xla") if is_integer else leaf

    def body(state: Any) -> Any:
        results = body_fn(*state, *additional_inputs)
        return tuple(results) if isinstance(results, list) else results

    init = pytree.tree_map(carried, tuple(carried_inputs))
    return while_loop(lambda state: cond_fn(*state, *additional_inputs), body, init)


def _scan(
    combine_fn: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
) -> Any:
    """torch's `scan`."""
    leaves = pytree.tree_leaves(xs)
    if not leaves:
        return init, []
    dim = _canonical(dim, leaves)
    carry, ys = scan(
        lambda carry, x: tuple(combine_fn(carry, x)),
        init,
        pytree.tree_map(lambda x: x.movedim(dim, 0), xs),
        reverse=reverse,
    )
    return carry, pytree.tree_map(lambda y: y.movedim(0, dim) if dim < y.dim() else y, ys)


def _associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """torch's `associative_scan`, in a number of steps that grows with the logarithm."""
    leaves, spec = pytree.tree_flatten(xs)
    if combine_mode not in ("pointwise", "generic"):
        raise ValueError(
            "combine_mode of an associative_scan is 'pointwise' or 'generic'; "
            f"got {combine_mode!r}. Write 'generic' for a function of whole slices."
        )
    function = combine_fn if combine_mode == "pointwise" else torch.vmap(combine_fn)

    def combine(left: list[Any], right: list[Any]) -> list[Any]:
        given = (pytree.tree_unflatten(side, spec) for side in (left, right))
        return pytree.tree_leaves(function(*given))

    dim = _canonical(dim, leaves)
    leaves = [x.movedim(dim, 0) for x in leaves]
    leaves = [x.flip(0) for x in leaves] if reverse else leaves
    results = _prefixes(combine, leaves)
    results = [y.flip(0) for y in results] if reverse else results
    return pytree.tree_unflatten([y.movedim(0, dim) for y in results], spec)


def _canonical(dim: int, leaves: Sequence[torch.Tensor]) -> int:
    """The dim of the first tensor, which is that of all tensors and of results, from the front."""
    num_dims = leaves[0].dim()
    if not -num_dims <= dim < num_dims:
        raise IndexError(
            f"the dim of a scan is one of the {num_dims} dims of its first tensor; got {dim}. "
            f"Give one in [{-num_dims}, {num_dims - 1}]."
        )
    return dim % num_dims


def _prefixes(combine: Callable[[list[Any], list[Any]], list[Any]], xs: list[Any]) -> list[Any]:
    """What combining the first n elements of dim 0 gives, for each n; as `jax.lax` computes it."""
    size = xs[0].shape[0]
    if size < 2:
        return xs
    pairs = combine([x[: size - 1 : 2] for x in xs], [x[1::2] for x in xs])
    odd = _prefixes(combine, pairs)
    if size == 2:
        return [torch.cat([x[:1], o]) for x, o in zip(xs, odd)]
    before = [o[: (size - 1) // 2] for o in odd]
    even = [torch.cat([x[:1], e]) for x, e in zip(xs, combine(before, [x[2::2] for x in xs]))]
    return [_interleaved(e, o) for e, o in zip(even, odd)]


def _interleaved(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    both = torch.stack([even[: odd.shape[0]], odd], 1).flatten(0, 1)
    return both if even.shape[0] == odd.shape[0] else torch.cat([both, even[odd.shape[0] :]])


# torch's operators, which get flat lists.


def _scan_operator(
    combine_fn: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any = ()
) -> Any:
    count = len(init)

    def step(carry: Any, x: Any) -> Any:
        results = list(combine_fn(*carry, *x, *additional_inputs))
        return results[:count], results[count:]

    carry, ys = scan(step, list(init), list(xs))
    return (*carry, *ys)


def _associative_scan_operator(
    combine_fn: Callable[..., Any], xs: Any, additional_inputs: Any = ()
) -> Any:
    def combine(left: list[Any], right: list[Any]) -> list[Any]:
        return list(combine_fn(*left, *right, *additional_inputs))

    return tuple(_prefixes(combine, list(xs)))


# What torch calls its function, the device's form of it, and of its operator.
_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cond": (_cond, _cond),
    "while_loop": (_while_loop, _while_loop),
    "scan": (_scan, _scan_operator),
    "associative_scan": (_associative_scan, _associative_scan_operator),
}


def install() -> None:
    """Replaces torch's functions, and registers kernels of its operators for the device."""
    for name, (form, kernel) in _FORMS.items():
        module = sys.modules.get(f"torch._higher_order_ops.{name}")
        theirs = getattr(module, name, None)
        operator = getattr(module, f"{name}_op", None)
        if theirs is None or operator is None:
            releases.note_absent(f"torch._higher_order_ops.{name}")
            continue
        # Compilers trace it with tensors of theirs, which say that they are on the device.
        traced = operator.py_kernels.get(DispatchKey.Autograd)
        choosing = kernel if traced is None else _choosing(traced, kernel)
        operator.py_impl(DispatchKey.AutogradXLA)(choosing)
        operator.py_impl(XLAShardedTensor)(kernel)
        chosen = _choosing(theirs, form)
        for place in (torch, torch._higher_order_ops, module):
            if getattr(place, name, None) is theirs:
                setattr(place, name, chosen)


def _choosing(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `ours` if a tensor of the device is among the arguments, else `theirs`."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return theirs(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, XLAShardedTensor) for leaf in leaves):
            return ours(*args, **kwargs)
        return theirs(*args, **kwargs)

    return call
