"""torch's recurrent layers, recorded as one scan over time for each layer and direction.

torch's own composition has about ten operations for each time step, so the size and the compile
time of a program would grow with the length of the sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from spmd_core.ops.kernels.recurrent import STEPS, recurrent_layer
from spmd_core.recording.jax_calls import call_jax
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

_NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _is_recorded(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: list[list[torch.Tensor]],
    has_biases: bool,
) -> bool:
    """Whether the scan supports this call.

    torch's composition reports wrong arguments, and is used in forward-mode AD and under
    torch.func's transforms, whose tensors are wrapped.
    """
    tensors = [x, *states, *(t for group in weights for t in group)]
    least = 4 if has_biases else 2
    if (
        any(t.__class__ is not XLAShardedTensor or t.dtype is not x.dtype for t in tensors)
        or forward_ad._current_level >= 0
        or not x.is_floating_point()
        or 0 in x.shape
        or any(len(group) not in (least, least + (kind == "lstm")) for group in weights)
    ):
        return False
    batch, size = x.shape[1], states[0].shape[-1]
    hidden = states[-1].shape[-1]
    return all(t.shape == (len(weights), batch, n) for t, n in zip(states, (size, hidden))) and all(
        group[1].shape == (_NUM_GATES[kind] * hidden, size) for group in weights
    )


def _layers(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: list[list[torch.Tensor]],
    has_biases: bool,
    num_directions: int,
    dropout: float,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The outputs (T, B, P·directions) of the last layer, and the last states of all layers."""
    last: list[tuple[torch.Tensor, ...]] = []
    for first in range(0, len(weights), num_directions):
        outputs = []
        for direction in range(num_directions):
            number = first + direction
            w_ih, w_hh, *rest = weights[number]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            projection = rest[-1] if len(rest) % 2 else None
            out, state = call_jax(
                recurrent_layer,
                F.linear(x, w_ih, b_ih),
                tuple(s[number] for s in states),
                w_hh,
                b_hh,
                projection,
                lengths,
                kind=kind,
                reverse=direction == 1,
            )
            outputs.append(out)
            last.append(state)
        x = outputs[0] if num_directions == 1 else torch.cat(outputs, -1)
        if dropout and first + num_directions < len(weights):
            x = torch.dropout(x, dropout, True)
    return x, *(torch.stack(parts) for parts in zip(*last))


def _grouped(
    params: Sequence[torch.Tensor], num_layers: int, bidirectional: bool
) -> list[list[torch.Tensor]]:
    """The weights of each layer and direction; none if their number does not fit."""
    count = num_layers * (2 if bidirectional else 1)
    each, rest = divmod(len(params), count) if count else (0, 1)
    return [] if rest else [list(params[i * each : (i + 1) * each]) for i in range(count)]


def _cast(kernel: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
    """The kernel in autocast's dtype, as on GPUs.

    Args:
        kernel: takes the input, perhaps sizes, the states and the parameters first.
        num_tensors: of these arguments.
    """

    def with_autocast(*args: Any) -> Any:
        if not torch.is_autocast_enabled("xla"):
            return kernel(*args)
        dtype = torch.get_autocast_dtype("xla")

        def cast(tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                is_cast = tree.dtype.is_floating_point and tree.dtype is not torch.float64
                return tree.to(dtype) if is_cast else tree
            return [cast(x) for x in tree]

        with torch.autocast("xla", enabled=False):
            return kernel(*map(cast, args[:num_tensors]), *args[num_tensors:])

    return with_autocast


def _input_kernel(kind: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, kind).input

    def kernel(
        x: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if kind == "lstm" else [hx]
        weights = _grouped(params, num_layers, bidirectional)
        x_TBI = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
        if (
            x.dim() != 3
            or not weights
            or not _is_recorded(kind, x_TBI, states, weights, has_biases)
        ):
            return overload.decompose(
                x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )
        out, *last = _layers(
            kind,
            x_TBI,
            states,
            weights,
            has_biases,
            1 + bidirectional,
            dropout if train else 0.0,
            None,
        )
        return (out.transpose(0, 1) if batch_first else out), *last

    return kernel


def _packed_kernel(kind: str) -> Callable[..., Any]:
    """Packed sequences: for each time step, one row of each sequence that is long enough.

    They are laid out as (T, B), scanned with a length for each sequence, and packed again.
    """
    overload = getattr(torch.ops.aten, kind).data

    def kernel(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        states = list(hx) if kind == "lstm" else [hx]
        weights = _grouped(params, num_layers, bidirectional)
        sizes = batch_sizes.tolist() if data.dim() == 2 and len(batch_sizes) else []
        # Only their shapes and dtypes matter here.
        like = data[:1].expand(sizes[0], -1)[None] if sizes else data
        if not sizes or not weights or not _is_recorded(kind, like, states, weights, has_biases):
            return overload.decompose(
                data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
            )
        times = torch.arange(len(sizes))[:, None]
        is_there = torch.arange(sizes[0]) < batch_sizes[:, None]
        first_rows = batch_sizes.cumsum(0)[:, None] - batch_sizes[:, None]
        rows = torch.where(is_there, first_rows + torch.arange(sizes[0]), 0)
        places = (times * sizes[0] + torch.arange(sizes[0]))[is_there]
        laid_out = data[rows.to(data.device)]
        out, *last = _layers(
            kind,
            laid_out,
            states,
            weights,
            has_biases,
            1 + bidirectional,
            dropout if train else 0.0,
            is_there.sum(0).to(data.device),
        )
        return out.flatten(0, 1)[places.to(data.device)], *last

    return kernel


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The overloads, without their namespace, and the kernels above autograd that record them."""
    for kind in STEPS:
        yield f"{kind}.input", _cast(_input_kernel(kind), 3)
        yield f"{kind}.data", _cast(_packed_kernel(kind), 4)
