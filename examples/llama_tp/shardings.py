"""How a Llama's tensors are sharded over mesh axes data, fsdp, context and tensor: the plans.

The plans are those of torch's tutorial on tensor parallelism, with its names. Beside them the batch
is split over data and fsdp, sequences over context, and `fully_shard` splits every parameter over
fsdp.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Placement
from transformers import LlamaForCausalLM

import spmd_core as spmd
from examples.llama_tp.presets import BATCH_AXES
from spmd_core.dtensor import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


def plan(*, sequence_parallel: bool, loss_parallel: bool, splits_kv_heads: bool) -> dict[str, Any]:
    """The style of each module along the axis tensor.

    Args:
        sequence_parallel: whether activations between attention and MLP are split along the
            sequence.
        loss_parallel: whether the logits stay split along the vocabulary.
        splits_kv_heads: whether the axis divides the heads of keys and values; else each device
            computes all of them.
    """
    hidden = Shard(1) if sequence_parallel else Replicate()  # of (batch, sequence, width)
    logits = Shard(-1) if loss_parallel else Replicate()
    tensor = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=hidden),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=hidden),
        "lm_head": ColwiseParallel(input_layouts=hidden, output_layouts=logits),
    }
    sequence = {
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(),
    }
    styles = tensor | (inputs_of_blocks(hidden) | sequence if sequence_parallel else {})
    if not splits_kv_heads:
        del styles["model.layers.*.self_attn.k_proj"], styles["model.layers.*.self_attn.v_proj"]
    return styles


def inputs_of_blocks(hidden: Placement) -> dict[str, Any]:
    """Gathers the input of attention and of MLPs once for all their layers; likewise its gradient.

    Args:
        hidden: the placement of the hidden state between them.
    """
    return {
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": hidden},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(hidden,), desired_input_layouts=(Replicate(),)
        ),
    }


def with_adapters(styles: Mapping[str, Any], *, sequence_parallel: bool) -> dict[str, Any]:
    """The plan of a model whose blocks' linear layers have LoRA adapters.

    The adapter's matrix that has the split features is split like the layer's weight, the other one
    is replicated: beside the layer's own collectives, only (batch, sequence, rank) moves. The
    gradients of layers and adapters with one input add up before they are reduced.
    """
    hidden = Shard(1) if sequence_parallel else Replicate()
    found: dict[str, Any] = inputs_of_blocks(hidden)
    for path, style in styles.items():
        if not path.endswith("_proj"):
            found[path] = style
            continue
        found[f"{path}.base_layer"] = style
        if isinstance(style, ColwiseParallel):
            found[f"{path}.lora_B.default"] = ColwiseParallel()
        else:
            found[f"{path}.lora_A.default"] = RowwiseParallel(output_layouts=hidden)
    return found


def parallelize(
    model: LlamaForCausalLM,
    mesh: spmd.Mesh,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
    has_adapters: bool = False,
) -> None:
    """Shards a model's parameters and activations over the mesh, in place.

    Args:
        model: a Llama on device `xla`.
        mesh: with axes among `presets.MESH_AXES`.
        sequence_parallel, loss_parallel: as for `plan`.
        has_adapters: whether its blocks' linear layers have LoRA adapters.
    """
    by = axis_size(mesh, "tensor")
    if "tensor" in mesh.shape():
        styles = plan(
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            splits_kv_heads=model.config.num_key_value_heads % by == 0,
        )
        if has_adapters:
            styles = with_adapters(styles, sequence_parallel=sequence_parallel)
        spmd.dtensor.parallelize_module(model, mesh, styles, axis="tensor")
    if "context" in mesh.shape():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.forward = spmd.context_parallel(mesh, "context")(attention.forward)
    if "fsdp" in mesh.shape():
        replicas = "data" if "data" in mesh.shape() else None
        for layer in model.model.layers:
            spmd.fully_shard(layer, mesh, extra_data_axis=replicas)
        spmd.fully_shard(model, mesh, extra_data_axis=replicas)


def axis_size(mesh: spmd.Mesh, axis: str) -> int:
    """The size of an axis; 1 if the mesh lacks it."""
    sizes: Mapping[Any, int] = mesh.shape()
    return sizes.get(axis, 1)


def batch_sharding(mesh: spmd.Mesh) -> spmd.ShardingSpec:
    """The sharding of token ids of shape (A, B, T), where a batch has A parts of B sequences."""
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape())
    sequence = "context" if "context" in mesh.shape() else None
    return spmd.ShardingSpec(mesh, (None, axes or None, sequence))


def compared(num_devices: int, num_heads: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """The plans that a comparison runs: name, mesh and options. Empty for an odd number of devices.

    Example:
        >>> [(name, mesh) for name, mesh, _ in compared(8, 8)][0::3]
        [('TP', 'data=2,tensor=4'), ('CP', 'data=2,context=4')]
    """
    if num_devices % 2:
        return []
    sequence, loss = "--sequence-parallel", "--loss-parallel"
    by = max(n for n in range(1, num_devices // 2 + 1) if num_devices % (2 * n) == 0)
    while num_heads % by:
        by //= 2
    data = num_devices // by
    found: list[tuple[str, str, tuple[str, ...]]] = [
        ("TP", f"data={data},tensor={by}", ()),
        ("TP + SP", f"data={data},tensor={by}", (sequence,)),
        ("TP + SP + loss", f"data={data},tensor={by}", (sequence, loss)),
        ("CP", f"data={data},context={by}", ()),
        ("FSDP x TP", f"fsdp={data},tensor={by}", (sequence, loss)),
    ]
    if num_devices % 8 == 0 and num_heads % 2 == 0:
        hybrid = f"data=2,fsdp={num_devices // 4},tensor=2"
        found.append(("HSDP x TP", hybrid, (sequence, loss)))
    return found
