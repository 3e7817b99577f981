"""How a GPT-2's tensors are sharded over mesh axes pipe, data, fsdp and tensor, by strategy.

`ddp` and `spmd` are marks alone; `fsdp` wraps each block with `fully_shard`, which gathers the
block's parameters before use, once more in backward, and reduce-scatters their gradients.
`pipeline` makes the blocks the stages of a pipeline along pipe.

Legend: B batch, T sequence, D width, V vocabulary, P positions, F 3·D or 4·D. The weights of
GPT-2's linear layers have the shape (in, out).
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

import spmd_core as spmd
from examples.gpt2.presets import BATCH_AXES

if TYPE_CHECKING:  # the import takes seconds, and a comparison needs the names of meshes alone
    from transformers import GPT2LMHeadModel

Spec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]

# The first pattern that matches the whole name decides. Axes that the mesh lacks drop out of the
# spec.
PARAMETER_RULES: tuple[tuple[str, Spec], ...] = (
    # (V, D). The output layer has the same weight, so logits are split along V. Of a gradient that
    # is scattered along its first dim, no device makes a transposed copy.
    (r"transformer\.wte\.weight", (("tensor", "fsdp"), None)),
    # Along P, because the gradient, a sum over the batch, is split along T: a table split along D
    # would need the gradient gathered.
    (r"transformer\.wpe\.weight", ("fsdp", None)),  # (P, D)
    # (D, F): column parallel.
    (r"transformer\.h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight", ("fsdp", "tensor")),
    (r"transformer\.h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.bias", ("tensor",)),  # (F,)
    # (F or D, D): row parallel, ends in one all-reduce. fsdp splits the rows, too: TPUs pad a last
    # dim to a multiple of 128, and with many devices a shard would have less.
    (r"transformer\.h\.\d+\.(attn|mlp)\.c_proj\.weight", (("tensor", "fsdp"), None)),
    # Replicated: splitting these small vectors, 0.1% of a model, would save little memory for the
    # cost of one gather each.
    (r"transformer\.h\.\d+\.(attn|mlp)\.c_proj\.bias", (None,)),  # (D,)
    (r"transformer\.(h\.\d+\.ln_[12]|ln_f)\.(weight|bias)", (None,)),  # (D,)
)

HIDDEN_BTD: Spec = (BATCH_AXES, None, None)
LOGITS_BTV: Spec = (BATCH_AXES, None, "tensor")
# A pipeline's region is manual over fsdp, so each position along fsdp has contiguous rows.
PIPELINE_TABLE_VD: Spec = (("fsdp", "tensor"), None)
PIPELINE_PROJECTION: Spec = ("tensor", "fsdp")
# What comes after the blocks is computed on all stages, each for a part of the sequences.
PIPELINE_LOGITS_BTV: Spec = ((*BATCH_AXES, "pipe"), None, "tensor")


def parameter_spec(name: str, mesh: spmd.Mesh) -> Spec:
    """The partition spec of the parameter called `name`.

    Raises:
        LookupError: no rule matches. A silently replicated parameter would only show as a lack of
            memory.
    """
    for pattern, spec in PARAMETER_RULES:
        if re.fullmatch(pattern, name):
            return on_mesh(spec, mesh)
    raise LookupError(
        f"every parameter must match one of the patterns in PARAMETER_RULES; got {name!r}, which "
        "matches none. Add a rule for it (an entry of None for each dim replicates the parameter)."
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
    """The number of shards of the batch dim."""
    return axis_size(mesh, "data") * axis_size(mesh, "fsdp")


def axis_size(mesh: spmd.Mesh, axis: str) -> int:
    """The size of an axis; 1 if the mesh lacks it."""
    sizes: Mapping[Any, int] = mesh.shape()
    return sizes.get(axis, 1)


def batch_axes(mesh: spmd.Mesh) -> tuple[str, ...]:
    """The axes of the mesh that split the batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.shape())


def batch_sharding(mesh: spmd.Mesh, *, minibatch: bool = False) -> spmd.ShardingSpec:
    """The sharding of token ids of shape (A, B, T), where a batch has A parts of B sequences.

    Args:
        mesh: the mesh of the run.
        minibatch: whether each process loads its sequences alone.
    """
    spec = on_mesh((None, BATCH_AXES, None), mesh)
    return spmd.ShardingSpec(mesh, spec, minibatch=minibatch)


def compared(num_devices: int) -> list[tuple[str, str]]:
    """The strategies with the meshes over which a comparison runs them.

    Example:
        >>> compared(3)
        [('ddp', 'data=3'), ('fsdp', 'fsdp=3'), ('spmd', 'fsdp=3')]
    """
    found = [("ddp", "data"), ("fsdp", "fsdp"), ("spmd", "fsdp")]
    meshes = [(strategy, f"{axis}={num_devices}") for strategy, axis in found]
    half = num_devices // 2
    if num_devices % 2 == 0 and half > 1:
        meshes += [(strategy, f"data=2,fsdp={half}") for strategy in ("fsdp", "spmd")]
        meshes.append(("spmd", f"fsdp={half},tensor=2"))
        meshes.append(("pipeline", f"pipe=2,fsdp={half}"))
    return meshes


def parallelize(model: "GPT2LMHeadModel", mesh: spmd.Mesh, strategy: str) -> None:
    """Shards a model's parameters and activations over the mesh, in place.

    Args:
        model: a GPT-2 on device `xla`.
        mesh: with axes among those of the strategy; `fsdp` needs an axis of that name.
        strategy: a key of `config.STRATEGIES`, but not "pipeline" (see `pipeline`).
    """
    if strategy == "fsdp":
        replicas = "data" if "data" in mesh.shape() else None
        for block in model.transformer.h:
            spmd.fully_shard(block, mesh, extra_data_axis=replicas)
        spmd.fully_shard(model, mesh, extra_data_axis=replicas)
    else:
        shard_parameters(model, mesh)
        annotate_activations(model, mesh)


def pipeline(
    model: "GPT2LMHeadModel", mesh: spmd.Mesh, *, num_microbatches: int, schedule: str, rounds: int
) -> spmd.Pipeline:
    """Makes a model's blocks the stages along mesh axis pipe, in place; returns the stages.

    Args:
        model: a GPT-2 on device `xla`.
        mesh: with an axis pipe, and others among data, fsdp and tensor.
        num_microbatches, schedule, rounds: as for `spmd.pipeline`.
    """
    shard_parameters(model, mesh)
    table_VD = model.transformer.wte.weight
    spmd.mark_sharding(table_VD, mesh, on_mesh(PIPELINE_TABLE_VD, mesh))
    for block in model.transformer.h:
        for layer in (block.attn, block.mlp):
            spmd.mark_sharding(layer.c_proj.weight, mesh, on_mesh(PIPELINE_PROJECTION, mesh))
    if schedule != "1f1b":  # which runs the output layer inside of the pipeline
        spec = on_mesh(PIPELINE_LOGITS_BTV, mesh)
        model.lm_head.register_forward_hook(
            lambda module, inputs, logits_BTV: _mark_if_even(logits_BTV, mesh, spec)
        )
    return spmd.pipeline(
        model.transformer.h,
        mesh,
        num_microbatches=num_microbatches,
        schedule=schedule,
        rounds=rounds,
        batch_axes=tuple(axis for axis in BATCH_AXES if axis in mesh.shape()),
    )


def bubble(stages: spmd.Pipeline) -> dict[str, float]:
    """The idle part of a stage's ticks: as the last step was recorded, and by the formula."""
    p, m, v = stages.plan.num_stages, stages.plan.num_microbatches, stages.plan.rounds
    return {
        "measured": (stages.num_runs - stages.num_useful_runs) / stages.num_runs,
        "formula": (p - 1) / (v * m + p - 1),
    }


def _mark_if_even(logits_BTV: torch.Tensor, mesh: spmd.Mesh, spec: Spec) -> None:
    """Marks the logits if the stages can share out the sequences."""
    if logits_BTV.shape[0] % (num_batch_shards(mesh) * axis_size(mesh, "pipe")) == 0:
        spmd.mark_sharding(logits_BTV, mesh, spec)


def shard_parameters(model: nn.Module, mesh: spmd.Mesh) -> None:
    """Marks every parameter; its gradient and optimizer state take the same sharding."""
    for name, parameter in model.named_parameters():
        spmd.mark_sharding(parameter, mesh, parameter_spec(name, mesh))


def annotate_activations(model: nn.Module, mesh: spmd.Mesh) -> None:
    """Marks the outputs of the embeddings, of every block and of the output layer, for FSDP.

    As both the batch and the weights are split over fsdp, the partitioner could split the hidden
    state along D and keep the weights in place; with these marks it gathers the weights instead.
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
