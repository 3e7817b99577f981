"""Loops whose number of iterations a value decides, and loops over numbers."""

from collections.abc import Callable
from typing import Any

import torch

from spmd_core.arguments import require_callable
from spmd_core.control_flow import while_gradients
from spmd_core.control_flow.operands import refuse_region
from spmd_core.control_flow.scans import scan


def while_loop(
    cond_fn: Callable[[Any], torch.Tensor], body_fn: Callable[[Any], Any], init: Any
) -> Any:
    """A loop on the device that goes on while a condition is true; nothing is read on the host.

    Computes what this does:

        while cond_fn(init):
            init = body_fn(init)
        return init

    Python calls each function once for all iterations, and several times if a gradient may be asked
    for, on tensors without values. Tensors that they close over are operands of the loop, with
    gradients. Random operations draw other numbers in each iteration. Does not wait for the device.

    How many iterations backward goes back over is not known, so 32 states are kept, at even
    distances, and it runs the iterations between them again: each of n iterations is run once for
    n up to 32, twice up to 1,024, and beyond that up to n / 1,024 times more.

    Args:
        cond_fn: state -> a boolean tensor without dims.
        body_fn: state -> the next state, of the same structure, shapes and dtypes.
        init: the first state: tensors on device `xla` in nested lists, tuples and dicts.

    Returns:
        The last state.

    Raises:
        TypeError: `cond_fn` returns something else, or `body_fn` changes the state's structure,
            shapes or dtypes.
        ControlFlowError: a function reads a value on the host, or writes in place to a tensor from
            outside; or, from backward, the functions draw random numbers, or a gradient of a
            gradient is asked for.
        DeviceMismatchError: a tensor on another device.

    Example:
        >>> import torch
        >>> x = torch.tensor(3.0, device="xla")
        >>> while_loop(lambda x: x < 100, lambda x: x * x, x).item()
        6561.0
    """
    require_callable("cond_fn", cond_fn)
    require_callable("body_fn", body_fn)
    refuse_region("while_loop")
    return while_gradients.while_loop(cond_fn, body_fn, init)


def fori_loop(
    lower: int | torch.Tensor,
    upper: int | torch.Tensor,
    body_fn: Callable[[torch.Tensor, Any], Any],
    init: Any,
) -> Any:
    """A loop on the device over the integers from `lower` up to and without `upper`.

    Computes what this does:

        for i in range(lower, upper):
            init = body_fn(torch.tensor(i), init)
        return init

    Between Python integers it is a `scan`, and differentiable; other bounds are another program.
    Where a bound is a tensor, it is a `while_loop`. Does not wait.

    Args:
        lower: the first integer: a number, or an integer tensor without dims on device `xla`.
        upper: the integer behind the last one.
        body_fn: (i, state) -> the next state; `i` is an int64 tensor without dims.
        init: the first state: tensors on device `xla` in nested lists, tuples and dicts.

    Returns:
        The last state.

    Raises:
        TypeError: a bound is no integer; otherwise as `scan` and `while_loop`.

    Example:
        >>> import torch
        >>> fori_loop(1, 5, lambda i, x: x * i, torch.ones((), device="xla")).item()
        24.0
    """
    require_callable("body_fn", body_fn)
    for name, bound in (("lower", lower), ("upper", upper)):
        _require_bound(name, bound)
    if isinstance(lower, int) and isinstance(upper, int):
        numbers = torch.arange(lower, max(lower, upper), device="xla")
        state, _ = scan(lambda state, i: (body_fn(i, state), None), init, numbers)
        return state
    first = torch.as_tensor(lower, dtype=torch.int64, device="xla")
    last = torch.as_tensor(upper, dtype=torch.int64, device="xla")
    _, state = while_loop(
        lambda state: state[0] < last,
        lambda state: (state[0] + 1, body_fn(state[0], state[1])),
        (first, init),
    )
    return state


def _require_bound(name: str, bound: object) -> None:
    is_number = isinstance(bound, int) and not isinstance(bound, bool)
    if isinstance(bound, torch.Tensor):
        is_integer = not (bound.is_floating_point() or bound.is_complex())
        is_number = is_integer and not bound.dim() and bound.dtype is not torch.bool
    if not is_number:
        got = (
            f"a {bound.dtype} tensor of shape {tuple(bound.shape)}"
            if isinstance(bound, torch.Tensor)
            else f"{type(bound).__name__} {bound!r}"
        )
        raise TypeError(
            f"{name} of a fori_loop is an integer, or an integer tensor without dims; got {got}. "
            "Write int(n), or n.long() of one element."
        )
