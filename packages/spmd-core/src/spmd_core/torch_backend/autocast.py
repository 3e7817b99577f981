"""`torch.autocast("xla", dtype=...)`: torch's policy for GPUs, registered for `AutocastXLA`.

Stock torch has that dispatch key and registers nothing for it.
"""

from collections.abc import Callable
from typing import Any

import torch

from spmd_core import releases

# Excludes all autocast keys, `AutocastXLA` among them, so that a call reaches the operation itself.
_below_autocast = torch._C._DisableAutocast

# From torch's documentation, "Autocast op reference" for CUDA: the operations that run in 16 bits,
# those that need 32 (the next two), and those that take the widest dtype of their inputs.
_LOWER_PRECISION = (
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum",
    "mm", "mv", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "scaled_dot_product_attention",
)  # fmt: skip
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist",
    "cdist", "renorm", "logsumexp", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_bilinear2d",
)  # fmt: skip
# Reductions and normalisations, which compute in their `dtype` argument, or in fp32 without one.
_FP32_SET_OPT_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "sum", "sum.dim_IntList",
)  # fmt: skip
_PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot", "cat", "stack",
)  # fmt: skip


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        eligible = (
            tree.is_floating_point()
            and tree.device.type == "xla"
            and tree.dtype is not torch.float64
        )
        return tree.to(dtype) if eligible and tree.dtype is not dtype else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(_cast(x, dtype) for x in tree)
    return tree


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for x in tree for t in _tensors(x)] if isinstance(tree, (list, tuple)) else []


def _run_in(
    choose: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype | None], overload: Any
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = choose(args, kwargs)
        with _below_autocast():
            if dtype is None:
                return overload(*args, **kwargs)
            return overload(
                *(_cast(a, dtype) for a in args), **{n: _cast(a, dtype) for n, a in kwargs.items()}
            )

    return kernel


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()}
    return None if len(dtypes) < 2 or torch.float64 in dtypes else torch.float32


def _set_dtype(overload: Any) -> Callable[..., Any]:
    position = next(i for i, a in enumerate(overload._schema.arguments) if a.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        floating = any(
            t.is_floating_point() and t.dtype is not torch.float64 for t in _tensors(args[0])
        )
        named = kwargs.get("dtype") is not None or (
            len(args) > position and args[position] is not None
        )
        with _below_autocast():
            return (
                overload(*args, **kwargs)
                if named or not floating
                else overload(*args, **{**kwargs, "dtype": torch.float32})
            )

    return kernel


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is not safe under autocast: its logarithm overflows in 16 bits. "
        "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), or leave autocast around it."
    )


def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")

    def register(names: tuple[str, ...], make: Callable[[Any], Callable[..., Any]]) -> None:
        for name in names:
            overload = releases.overload(f"aten.{name}" if "." in name else f"aten.{name}.default")
            if overload is not None:
                library.impl(name, make(overload), "AutocastXLA")

    register(
        _LOWER_PRECISION,
        lambda op: _run_in(lambda args, kwargs: torch.get_autocast_dtype("xla"), op),
    )
    register(_FP32, lambda op: _run_in(lambda args, kwargs: torch.float32, op))
    register(_FP32_SET_OPT_DTYPE, _set_dtype)
    register(_PROMOTE, lambda op: _run_in(_widest, op))
    library.impl("binary_cross_entropy", _refuse, "AutocastXLA")
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastXLA")
    _libraries.append(fallthrough)
    return library


# torch drops registrations when their Library is deleted.
# Guarded by: imports. Cleared by: never.
_libraries: list[torch.library.Library] = []
_libraries.append(_install())
