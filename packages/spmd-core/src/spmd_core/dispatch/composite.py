"""Composite operations recorded as one, by kernels above autograd, not as torch decomposes them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch.autograd import forward_ad

from spmd_core import releases
from spmd_core.config import config
from spmd_core.dispatch import recurrent, router
from spmd_core.dispatch.fallback import count_writes
from spmd_core.dispatch.router import out_handler
from spmd_core.graph.values import Entry, Indices, Spec
from spmd_core.ops import registry
from spmd_core.ops.attention import is_documents
from spmd_core.ops.kernels.traits import SAME
from spmd_core.recording import random_stream, split_sequences
from spmd_core.recording.calls import NO_KWARGS, Handler, functional_handler, known, record_own
from spmd_core.recording.views import conjugated
from spmd_core.tensor.sharded_tensor import XLAShardedTensor

aten = torch.ops.aten


def _recording(overload: torch._ops.OpOverload) -> Handler:
    lowering = registry.find_lowering(overload)
    assert lowering is not None, f"{overload} has no lowering"
    return functional_handler(lowering)


def recorder(name: str) -> Handler:
    """Records calls of an operation of this package.

    They go through torch's dispatcher only if a mode is active, which sees nothing else: one that
    saves results for a checkpoint's recomputation, for instance, or one that counts FLOPs. The
    dispatcher accepts no tensor as a seed.
    """
    overload = registry.resolve(name)
    record = _recording(overload)
    seed = next((i for i, a in enumerate(overload._schema.arguments) if a.name == "seed"), None)

    def call(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_seen = torch._C._len_torch_dispatch_stack() > 0
        if is_seen and (seed is None or not isinstance(args[seed], torch.Tensor)):
            return overload(*args, **kwargs)
        return record(args, kwargs)

    return call


_record_layer_norm = _recording(aten.layer_norm.default)
_record_attention = recorder("spmd.attention.default")
_record_attention_lse = recorder("spmd.attention.lse")
_record_attention_backward = recorder("spmd.attention_backward.default")
_record_attention_kept = recorder("spmd.attention_kept.default")


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """`aten::layer_norm`, recorded as one operation if no gradient is needed.

    torch's composition also returns the statistics for a backward, which cost without one.
    """
    if torch.is_grad_enabled() or not isinstance(x, XLAShardedTensor):
        return torch.native_layer_norm(x, normalized_shape, weight, bias, eps)[0]
    return _record_layer_norm((x, normalized_shape, weight, bias, eps), NO_KWARGS)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`aten::scaled_dot_product_attention`: one recorded operation, and one for its backward.

    torch's own composition runs if `torch.nn.attention.sdpa_kernel` leaves only the math backend,
    in forward-mode AD, and under torch.func's transforms, whose tensors are wrapped.
    """
    if (
        query.__class__ is not XLAShardedTensor
        or key.__class__ is not XLAShardedTensor
        or value.__class__ is not XLAShardedTensor
        or not may_record_attention()
        or (attn_mask is not None and is_documents(attn_mask.dtype))  # torch refuses these
    ):
        return aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return recorded_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def may_record_attention() -> bool:
    """Whether an attention of plain tensors may be recorded as one operation."""
    return (_flash_enabled() or _fused_enabled()) and forward_ad._current_level < 0


def recorded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention over tensors of this device as one operation; an integer mask has document ids."""
    split = split_sequences.current.get()
    if split is not None:
        query, key, value = split(query, key, value, attn_mask, dropout_p, is_causal)
    leading = query.shape[:-2]
    if key.shape[:-2] != leading or value.shape[:-2] != leading:
        query, key, value, enable_gqa = _align_leading_dims(query, key, value, enable_gqa)
    else:
        enable_gqa = False
    seed = None
    if dropout_p != 0:
        if not 0 <= dropout_p <= 1:
            raise RuntimeError(
                "dropout probability has to be between 0 and 1, "
                f"but got {dropout_p}. Pass a probability."
            )
        seed = _seed()
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return _Attention.apply(
            query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa
        )
    return _record_attention(
        (query, key, value, attn_mask, seed, dropout_p, is_causal, scale, enable_gqa), NO_KWARGS
    )


def _seed() -> int | torch.Tensor:
    """A seed for dropout: a number, or inside `random_stream.mixing` a tensor local to a device."""
    if random_stream.position.make is None:
        return random_stream.draw()
    tensor = random_stream.position.make()
    entry = known(("mixed seed", tensor.dtype), lambda: _mixed_seed(tensor))
    with torch.no_grad():
        seed: torch.Tensor = record_own(entry, (tensor,), (random_stream.draw(),))
    return seed


def _mixed_seed(tensor: torch.Tensor) -> Entry:
    def kernel(context: registry.Context, inputs: list[Any], numbers: list[Any]) -> Any:
        assert context.key is not None, "a random operation has a key"
        bits = jax.random.bits(jax.random.fold_in(context.key, inputs[0]), (), np.uint64)
        return [(bits >> np.uint64(1)).astype(np.int64)]

    out = Spec.contiguous((), torch.int64)
    return Entry("spmd::mixed_seed", kernel, (out,), number_kinds=(int,), random=True)


_flash_enabled = torch._C._get_flash_sdp_enabled


def _fused_enabled() -> bool:
    """Whether a fused backend is enabled; with no backend at all torch's composition raises."""
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
        or torch._C._get_overrideable_sdp_enabled()
    )


def _align_leading_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Makes the leading dims of query, key and value equal, by views.

    Only grouped heads keep a dim of their own, also if one kv head serves all query heads without
    `enable_gqa`.
    """
    if min(query.dim(), key.dim(), value.dim()) < 3:
        grouped = False
    else:
        heads, of_key, of_value = query.shape[-3], key.shape[-3], value.shape[-3]
        grouped = enable_gqa or of_key == of_value == 1
        if (
            grouped
            and of_key != of_value
            and of_key
            and of_value
            and heads % of_key == 0
            and heads % of_value == 0
        ):
            key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    kept = -3 if grouped else -2
    leading = torch.broadcast_shapes(*(x.shape[:kept] for x in (query, key, value)))
    query, key, value = (
        x if x.shape[:kept] == leading else x.expand(*leading, *x.shape[kept:])
        for x in (query, key, value)
    )
    return query, key, value, grouped and query.shape[-3] != key.shape[-3]


class _Attention(torch.autograd.Function):
    """Attention whose backward recomputes the probabilities and the dropout mask.

    Only the result and the log of the sum of exponents are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        options = (seed, dropout_p, is_causal, scale, enable_gqa)
        arguments = (query, key, value, attn_mask, *options)
        out, lse = _record_attention_lse(arguments, NO_KWARGS)
        ctx.save_for_backward(query, key, value, attn_mask, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, attn_mask, out, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():  # create_graph=True
            return (
                *_differentiable_backward(
                    grads[0], (query, key, value, attn_mask), wanted, *ctx.options
                ),
                None,
                None,
                None,
                None,
                None,
            )
        found = _record_attention_backward(
            (grads[0], query, key, value, attn_mask, out, lse, *ctx.options, wanted), NO_KWARGS
        )
        return (*found, None, None, None, None, None)


def _differentiable_backward(
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    seed: int | torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> list[torch.Tensor | None]:
    """Gradients through torch's composition of attention, which autograd can differentiate.

    The dropout is that of the forward.
    """
    # Views, so that one tensor that is query, key and value at once gets three gradients.
    query, key, value, attn_mask = (None if x is None else x.view_as(x) for x in inputs)
    assert query is not None and key is not None and value is not None
    if attn_mask is not None and is_documents(attn_mask.dtype):
        attn_mask, is_causal = explicit_mask(attn_mask, is_causal), False
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # torch's function converts it before it calls the composition, which would add 0 and 1.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            ~attn_mask, -torch.inf
        )
    out, weights = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if seed is not None:
        kept = _record_attention_kept((query, key, seed, dropout_p, is_causal), NO_KWARGS)
        value_per_head = (
            value.repeat_interleave(query.shape[-3] // value.shape[-3], -3) if enable_gqa else value
        )
        out = (weights * kept * (0.0 if dropout_p == 1 else 1 / (1 - dropout_p))) @ value_per_head
    of = [x for x, yes in zip((query, key, value, attn_mask), wanted) if x is not None and yes]
    found = iter(torch.autograd.grad(out, of, grad, create_graph=True))
    return [next(found) if yes else None for yes in wanted]


def explicit_mask(document_ids: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Which query attends to which key: bool of shape (batch, 1, rows, rows)."""
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return mask.tril() if is_causal else mask


def resolve_conj(x: torch.Tensor) -> torch.Tensor:
    """`aten::resolve_conj`: a copy of a conjugate, otherwise `x`.

    The device has no lazy conjugates, but a write to the result must not reach `x`.
    """
    is_copied = conjugated(x) if isinstance(x, XLAShardedTensor) else x.is_conj()  # a fake tensor
    return x.clone() if is_copied else x


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`aten::ctc_loss` with the lengths as tensors on the device.

    The lengths may be lists or tensors on the CPU, whose values are checked. On the device they are
    inputs of the program, so that other lengths compile nothing.

    Raises:
        RuntimeError: a length is no whole number, or one that no sequence has, as in torch.
    """
    for name, given in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        _check_lengths(name, torch.as_tensor(given), log_probs, targets)
    lengths = [torch.as_tensor(x).to(log_probs.device) for x in (input_lengths, target_lengths)]
    return aten.ctc_loss.Tensor.decompose(
        log_probs, targets, *lengths, blank, reduction, zero_infinity
    )


def _check_lengths(
    name: str, lengths: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Of `ctc_loss`, in torch's words; values that only the device knows are not read."""
    kind = lengths.dtype
    if kind.is_floating_point or kind.is_complex or kind is torch.bool:
        raise RuntimeError(f"{name} must be integral; got {kind}. Pass {name}.long().")
    if type(lengths) is not torch.Tensor or lengths.device.type != "cpu" or not lengths.numel():
        return
    is_joined = name == "target_lengths" and targets.dim() == 1  # one target after the other
    most = log_probs.shape[0] if name == "input_lengths" else targets.shape[-1]
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > most:
        rule = "at least 0" if low < 0 else f"at most {most}"
        raise RuntimeError(
            f"Expected {name} to have value {rule}, but got value {low if low < 0 else high}. Pass "
            "each sequence's own length, without its padding."
        )
    if is_joined and int(lengths.sum()) != most:
        raise RuntimeError(
            f"Expected target_lengths to have the sum {most}, the number of joined targets, but "
            f"got {int(lengths.sum())}. Pass the length of each target."
        )


def one_hot(x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`aten::one_hot`, with checked indices, as torch would ignore those of no class."""
    if num_classes == 0 and x.numel():
        raise RuntimeError("Class values must be smaller than num_classes.")  # torch's words
    if num_classes > 0 and x.numel() and x.dtype is torch.int64:
        x = _checked(x, num_classes)
    encoded = aten.one_hot.default._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, x, num_classes
    )
    return encoded.contiguous()


def _checked(x: torch.Tensor, size: int) -> torch.Tensor:
    """The same tensor; programs check that its elements are indices of a dim."""
    if not config.check_indices or x.__class__ is not XLAShardedTensor:
        return x
    spec = Spec.contiguous(tuple(x.shape), x.dtype)

    def make() -> Entry:
        rule = Indices(0, 0, size - 1)
        kernel = lambda context, inputs, numbers: list(inputs)  # noqa: E731
        return Entry("spmd::checked_indices", kernel, (spec,), indices=(rule,), traits=SAME)

    result: torch.Tensor = record_own(known(("checked indices", spec, size), make), (x,))
    return result


def _out_kernel(overload: torch._ops.OpOverload, *, counts: bool) -> Callable[..., Any]:
    """A kernel for an `out=` overload: computes the result, then copies it to `out`.

    torch's composition writes through reshaped results, assuming that they alias `out`.

    Args:
        overload: the overload.
        counts: whether autograd counts the write to `out`, as for eager torch's composition.
    """
    handler = out_handler(overload)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if not any(isinstance(a, XLAShardedTensor) for a in given):  # fake tensors
            return overload.decompose(*args, **kwargs)
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in given
        ):
            raise RuntimeError(
                f"{overload._schema.name.removeprefix('aten::')}(): functions with out=... "
                "arguments don't support automatic differentiation, "
                "but one of the arguments requires grad."
            )
        result = handler(args, kwargs)
        if counts:
            count_writes([kwargs["out"]])
        return result

    return kernel


# torch knows the derivatives of these operations, but decomposes them for a backend without its own
# kernel. A decomposed `linear` merges the dims of its input, and rounds a 16-bit sum twice.
_NOT_DECOMPOSED = ("linear", "mish_backward", "silu_backward")


# By overload, without its namespace.
_KERNELS: dict[str, Callable[..., Any]] = {
    "ctc_loss.IntList": ctc_loss,
    "ctc_loss.Tensor": ctc_loss,
    "layer_norm.default": layer_norm,
    "one_hot.default": one_hot,
    "scaled_dot_product_attention.default": attention,
}


def _handler(kernel: Callable[..., Any], otherwise: Handler) -> Handler:
    """The kernel as the router's handler of the overload."""
    return lambda args, kwargs: kernel(*args, **kwargs)


def _unreachable_kernel(name: str) -> Callable[..., Any]:
    """A backend kernel that is never called: calls are recorded before they reach it.

    torch only checks that it exists.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"aten::{name} reached the backend without being recorded")

    return kernel


def install() -> torch.library.Library:
    """Registers the kernels, which live as long as the returned library."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("resolve_conj", resolve_conj, "AutogradXLA")
    counting = {"aten.kron.out": False, "aten.matmul.out": True}
    for overload, counts in releases.overloads(counting).items():
        library.impl(
            f"{overload._schema.name.removeprefix('aten::')}.out",
            _out_kernel(overload, counts=counts),
            "AutogradXLA",
        )
    for name, kernel in (*_KERNELS.items(), *recurrent.kernels()):
        library.impl(name.removesuffix(".default"), kernel, "AutogradXLA")
        # Under inference_mode a call reaches the router without passing autograd's kernels.
        router.wrap(registry.resolve(f"aten.{name}"), partial(_handler, kernel))
    for name in _NOT_DECOMPOSED:
        library.impl(name, _unreachable_kernel(name), "XLA")
    return library
