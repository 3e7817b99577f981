"""Where each tensor of a GPT-2 lives: parameter name in, partition spec out, for any mesh with axes among data, fsdp and tensor.

Legend: B batch, T sequence, D width, V vocabulary, P positions, F 3·D or 4·D. GPT-2's linear layers keep their weights as (in, out).
"""

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

import spmd_core as spmd

Spec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]

MESH_AXES = ("data", "fsdp", "tensor")

# The batch is split over both: fsdp is data parallelism whose parameters, gradients and optimizer state are split as well.
BATCH_AXES = ("data", "fsdp")

# The first pattern that matches the whole name decides. An axis that the mesh lacks is left out of the spec.
PARAMETER_RULES: tuple[tuple[str, Spec], ...] = (
    (
        r"transformer\.wte\.weight",
        ("tensor", "fsdp"),
    ),  # (V, D); also the output layer, so logits come out split along V
    # Along P: its gradient, a sum over the batch, comes split along T, and would have to be gathered whole to be split along D.
    (r"transformer\.wpe\.weight", ("fsdp", None)),  # (P, D)
    (
        r"transformer\.h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight",
        ("fsdp", "tensor"),
    ),  # (D, F): column parallel
    (r"transformer\.h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.bias", ("tensor",)),  # (F,)
    (
        r"transformer\.h\.\d+\.(attn|mlp)\.c_proj\.weight",
        ("tensor", "fsdp"),
    ),  # (F or D, D): row parallel, ends in one all-reduce
    # A gather for each of these small vectors would cost more than their memory is worth: together they are 0.1% of a model.
    (r"transformer\.h\.\d+\.(attn|mlp)\.c_proj\.bias", (None,)),  # (D,)
    (r"transformer\.(h\.\d+\.ln_[12]|ln_f)\.(weight|bias)", (None,)),  # (D,)
)

HIDDEN_BTD: Spec = (BATCH_AXES, None, None)
LOGITS_BTV: Spec = (BATCH_AXES, None, "tensor")
LOOKED_UP_VD: Spec = ("tensor", None)


def parameter_spec(name: str, mesh: spmd.Mesh) -> Spec:
    """The partition spec of the parameter called `name`.

    Raises:
        LookupError: no rule matches; a parameter that is silently replicated would only be noticed as missing memory.
    """
    for pattern, spec in PARAMETER_RULES:
        if re.fullmatch(pattern, name):
            return on_mesh(spec, mesh)
    raise LookupError(
        f"every parameter must match one of the patterns in PARAMETER_RULES; got {name!r}, which matches none. Add a rule for it "
        "(an entry of None for each dim replicates the parameter)."
    )


def on_mesh(spec: Spec, mesh: spmd.Mesh) -> Spec:
    """`spec` without the axes that `mesh` lacks.

    Example:
        >>> on_mesh((("data", "fsdp"), "tensor"), spmd.parse_mesh("fsdp=8", 8))
        ('fsdp', None)
    """
    axes: Mapping[Any, int] = mesh.shape()

    def known(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        kept = tuple(
            axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis in axes
        )
        return None if not kept else kept[0] if len(kept) == 1 else kept

    return tuple(known(entry) for entry in spec)


def num_batch_shards(mesh: spmd.Mesh) -> int:
    """Number of pieces that the batch is split into."""
    sizes: Mapping[Any, int] = mesh.shape()
    return sizes.get("data", 1) * sizes.get("fsdp", 1)


def batch_sharding(mesh: spmd.Mesh) -> spmd.ShardingSpec:
    """How token ids of shape (B, T) are split."""
    return spmd.ShardingSpec(mesh, on_mesh((BATCH_AXES, None), mesh))


def shard_parameters(model: nn.Module, mesh: spmd.Mesh) -> None:
    """Marks every parameter. Gradients and optimizer state follow their parameter."""
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, mesh, parameter_spec(name, mesh))


def annotate_activations(model: nn.Module, mesh: spmd.Mesh) -> None:
    """Marks what leaves the embeddings, every block and the output layer, and the token table where it is looked up.

    With the batch and the weights both split over fsdp, a partitioner may as well split the hidden state along D and leave the weights where they
    are; these marks say that it is the weights that move.
    """

    def marked(spec: Spec) -> Any:
        spec = on_mesh(spec, mesh)

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            spmd.mark_sharding(
                output if isinstance(output, torch.Tensor) else output[0], mesh, spec
            )

        return hook

    for name, module in model.named_modules():
        if re.fullmatch(r"transformer\.(drop|h\.\d+|ln_f)", name):
            module.register_forward_hook(marked(HIDDEN_BTD))
        elif name == "lm_head":
            module.register_forward_hook(marked(LOGITS_BTV))
        elif name == "transformer.wte" and isinstance(module, nn.Embedding):
            _gather_at_lookup(module, on_mesh(LOOKED_UP_VD, mesh), mesh)


def _gather_at_lookup(table: nn.Embedding, spec: Spec, mesh: spmd.Mesh) -> None:
    """Makes a lookup read a view of the table that is marked with `spec`, and so, by the mark's rule for gradients, its gradient too.

    A row of the table is split over fsdp and so are the tokens that look it up. Left alone, the partitioner gathers the tokens' gradients (B, T, D)
    on every device before it adds them into the table's.
    """

    def forward(ids_BT: torch.Tensor) -> torch.Tensor:
        table_VD = table.weight.view_as(
            table.weight
        )  # a view: the parameter itself keeps its own sharding
        return F.embedding(ids_BT, spmd.mark_sharding(table_VD, mesh, spec))

    table.forward = forward  # type: ignore[assignment, method-assign]  # a hook could change the output, but not the weight
