"""`scan`: a loop over the first dim of tensors, as one operation of the program."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from spmd_core import control_flow

# What decides, in PyTorch/XLA, which values backward keeps.
PartitionFn = Callable[..., Any]


def default_partition(*args: Any, **kwargs: Any) -> Any:
    """The `partition_fn` by default: backward reads what the forward loop has kept."""
    raise NotImplementedError(
        "default_partition stands for this project's own choice of what backward keeps, and traces "
        "nothing; got a call of it. Pass it to scan, or use torch.utils.checkpoint."
    )


def tree_flatten_none(pytree_: Any) -> tuple[list[Any], Any]:
    """As `torch.utils._pytree.tree_flatten`; None has no leaves.

    Returns:
        The leaves, and what `tree_unflatten_none` needs.
    """
    leaves, spec = pytree.tree_flatten(pytree_)
    return [leaf for leaf in leaves if leaf is not None], (spec, [leaf is None for leaf in leaves])


def tree_unflatten_none(leaves: list[Any], form: Any) -> Any:
    """The tree of these leaves, from the second result of `tree_flatten_none`."""
    spec, is_none = form
    given = iter(leaves)
    return pytree.tree_unflatten([None if none else next(given) for none in is_none], spec)


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: PartitionFn = default_partition,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Carries a state over the slices of `xs`; see `spmd_core.control_flow.scan`.

    Args:
        fn: (carry, x) -> (new carry, y).
        init: the first carry: tensors, in nested lists, tuples and dicts.
        xs: tensors of shape `(length, ...)`, so nested.
        partition_fn: not used, with a warning; `torch.utils.checkpoint` inside of `fn` chooses
            what backward keeps.
        is_fn_pure: not used: a function is recorded at each call, and what it records is compared.

    Returns:
        The last carry, and the stacked results.

    Raises:
        ValueError: `fn` is not callable; `xs` has no tensor, or tensors of several lengths.
        AssertionError: `fn` changes the structure, the shapes or the dtypes of the carry.
        RuntimeError: `fn` writes in place to its arguments, or reads a value on the host.
    """
    if not callable(fn):
        raise ValueError(f"`fn` must be callable; got {fn!r}. Pass a function of carry and x.")
    leaves = [x for x in pytree.tree_leaves(xs) if isinstance(x, torch.Tensor)]
    if not leaves:
        raise ValueError(
            f"`xs` must have a tensor to go over; got {xs!r}. "
            "Call spmd_core.control_flow.scan(fn, init, length=n) for a loop without one."
        )
    warn_of_partition(partition_fn)
    return control_flow.scan(with_checked_carry(fn), init, xs)


def warn_of_partition(partition_fn: PartitionFn) -> None:
    """Warns the caller's caller if it has chosen a `partition_fn`."""
    if partition_fn is not default_partition:
        warnings.warn(
            "partition_fn is not used: backward keeps what it reads. Call torch.utils.checkpoint "
            "inside of what the loop calls to have it computed again instead.",
            stacklevel=3,
        )


def with_checked_carry(fn: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """The function, with AssertionError if the carry's structure, shapes or dtypes change."""

    def checked(carry: Any, x: Any) -> tuple[Any, Any]:
        new_carry, y = fn(carry, x)
        before, after = _form(carry), _form(new_carry)
        if before != after:
            raise AssertionError(
                "fn returns a carry of the structure, shapes and dtypes that it gets; "
                f"got {after} for {before}. Convert one of them, or return it as y."
            )
        return new_carry, y

    return checked


def _form(tree: Any) -> Any:
    """The tree with shape and dtype in place of each tensor."""
    return pytree.tree_map(
        lambda t: (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t, tree
    )
