"""The recipe's GPT-2 train step as one hand-written jax program over a mesh.

The program computes what a step of `examples/gpt2/train.py` computes: tied token table with padded
vocabulary, bfloat16 autocast with the operations that torch's autocast keeps in float32, clipping
by the global norm of all gradients, AdamW in float32; with each block computed again in backward,
or with everything kept. It is written as one manual region (`jax.shard_map`) over a mesh with axes
fsdp and tensor, so that each collective stands in the code:

- fsdp splits the batch, the parameters, their gradients and Adam's moments. A weight is cast to
  bfloat16 and gathered where it is used, again in backward, and its gradient is reduce-scattered in
  float32.
- tensor splits the heads, the inner width of the MLP and the vocabulary (Megatron, Shoeybi et al.
  2019): two all-reduces a block in each direction, and logits that stay split.

Legend: B sequences, T tokens, V vocabulary, D width, F 4·D, H heads, K head dim, N tokens of a
device's batch, S rows of a shard of the token table.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import jax_gpt2_step as small
from benchmarks.reference_options import AXES
from examples.gpt2.presets import ModelPreset, padded_vocab

FSDP, TENSOR = AXES
BETA_1, BETA_2, EPSILON, WEIGHT_DECAY, MAX_NORM = 0.9, 0.95, 1e-8, 0.1, 1.0

Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class Setup:
    """What is compiled.

    Attributes:
        model: sizes.
        fsdp: shards of batch and state.
        tensor: shards of heads, inner width and vocabulary; must divide the heads.
        batch: sequences on each shard of the batch.
        recomputes: whether each block runs again in backward.
        dtype: of products and of what goes in and comes out of them: bfloat16 as under autocast, or
            float32.
    """

    model: ModelPreset
    fsdp: int = 1
    tensor: int = 1
    batch: int = 1
    recomputes: bool = True
    dtype: Any = jnp.bfloat16

    @property
    def vocabulary(self) -> int:
        """Rows of the token table, padded as the recipe pads them."""
        return padded_vocab(self.model.vocab_size, 128)


class State(NamedTuple):
    """The arrays that a step replaces. A step donates its state: the old arrays are deleted."""

    parameters: Parameters
    mean: Parameters
    square: Parameters
    num_steps: jax.Array  # int32, completed steps


# --- Parameters and their shardings ---------------------------------------------------------------

# By the end of the name, how each dim is split. Queries, keys and values have a dim of their own,
# so that a tensor shard has whole heads of each; all else has Hugging Face's shapes.
_SPECS: dict[str, tuple[Any, ...]] = {
    "wte.weight": ((TENSOR, FSDP), None),
    "wpe.weight": (FSDP, None),
    "attn.c_attn.weight": (FSDP, None, TENSOR),
    "attn.c_attn.bias": (None, TENSOR),
    "mlp.c_fc.weight": (FSDP, TENSOR),
    "mlp.c_fc.bias": (TENSOR,),
    "attn.c_proj.weight": (TENSOR, FSDP),
    "mlp.c_proj.weight": (TENSOR, FSDP),
}


def parameter_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes, by Hugging Face's names; `c_attn` has its outputs as (3, D)."""
    model = setup.model
    shapes = small.parameter_shapes(
        small.Shape(model.num_layers, model.width, model.num_heads, setup.vocabulary, 1, model.seq)
    )
    return {
        name: (*size[:-1], 3, model.width) if ".c_attn." in name else size
        for name, size in shapes.items()
    }


def partition_spec(name: str) -> PartitionSpec:
    """How a parameter is split; layer norms and biases of row-parallel layers are replicated."""
    ends = (spec for end, spec in _SPECS.items() if name.endswith(end))
    return PartitionSpec(*next(ends, ()))


# --- Collectives with the gradient that their use needs -------------------------------------------


def _with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function of an array with a given transpose; both also get the static arguments."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def function(x: jax.Array, *static: Any) -> jax.Array:
        result: jax.Array = forward(x, *static)
        return result

    function.defvjp(
        lambda x, *static: (forward(x, *static), None),
        lambda *given: (backward(given[-1], *given[:-2]),),
    )
    return function


def _gather(x: jax.Array, dim: int, dtype: Any) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=dim, tiled=True)


def _scatter(grad: jax.Array, dim: int, dtype: Any) -> jax.Array:
    # In float32, as parameters and their gradients are: torch casts before it sums.
    return jax.lax.psum_scatter(grad.astype(np.float32), FSDP, scatter_dimension=dim, tiled=True)


# A float32 shard gathered in the dtype of its use; its gradient is summed over the batch.
gathered = _with_gradient(_gather, _scatter)
# A replicated parameter in the dtype of its use.
shared = _with_gradient(
    lambda x, axes, dtype: x.astype(dtype),
    lambda grad, axes, dtype: jax.lax.psum(grad.astype(np.float32), axes),
)
# The entry and the exit of a layer whose weight is split: f and g of Megatron's paper.
entering = _with_gradient(lambda x, axis, _: x, lambda grad, axis, _: jax.lax.psum(grad, axis))
leaving = _with_gradient(lambda x, axis, _: jax.lax.psum(x, axis), lambda grad, axis, _: grad)


# --- The model, on the blocks of one device -------------------------------------------------------


class Layers:
    """A parameter as a layer uses it: gathered, in the dtype of the products."""

    def __init__(self, setup: Setup, parameters: Mapping[str, jax.Array], prefix: str) -> None:
        self._setup, self._parameters, self._prefix = setup, parameters, prefix

    def weight(self, name: str) -> jax.Array:
        """A matrix of the products, gathered along fsdp."""
        dim = list(_SPECS[name]).index(FSDP)
        return gathered(self._parameters[self._prefix + name], dim, self._setup.dtype)

    def bias(self, name: str) -> jax.Array:
        """A vector that is added to a product."""
        return shared(self._parameters[self._prefix + name], FSDP, self._setup.dtype)

    def norm(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """Layer norm in float32."""
        weight_D, bias_D = (
            shared(self._parameters[f"{self._prefix}{name}.{part}"], FSDP, np.float32)
            for part in ("weight", "bias")
        )
        return small.layer_norm(x_BTD, weight_D, bias_D)


def attention(setup: Setup, qkv_BT3D: jax.Array, *, on_tpu: bool) -> jax.Array:
    """Causal attention of a device's heads: splash attention where it runs, else written out."""
    batch, seq, _, width = qkv_BT3D.shape
    head_dim = setup.model.width // setup.model.num_heads
    q_BHTK, k_BHTK, v_BHTK = (
        qkv_BT3D[:, :, i].reshape(batch, seq, width // head_dim, head_dim).swapaxes(1, 2)
        for i in range(3)
    )
    scale = 1 / math.sqrt(head_dim)
    if on_tpu and seq % 128 == 0 and head_dim % 64 == 0 and setup.dtype == jnp.bfloat16:
        scaled = (q_BHTK.astype(np.float32) * scale).astype(q_BHTK.dtype)
        out_BHTK = jax.vmap(_splash(q_BHTK.shape[1], seq))(scaled, k_BHTK, v_BHTK)
    else:
        scores = jnp.einsum("bhtk,bhsk->bhts", q_BHTK, k_BHTK).astype(np.float32) * scale
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -np.inf), axis=-1)
        out_BHTK = jnp.einsum("bhts,bhsk->bhtk", weights.astype(v_BHTK.dtype), v_BHTK)
    return out_BHTK.swapaxes(1, 2).reshape(batch, seq, width)


def _splash(num_heads: int, seq: int) -> Callable[..., jax.Array]:
    # Not at the top: the module is experimental, and only programs for TPUs should depend on it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_mask as masks,
    )

    block = next(size for size in (512, 256, 128) if seq % size == 0)
    sizes = kernels.BlockSizes(*(block,) * 8)
    mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * num_heads)
    with jax.ensure_compile_time_eval():
        made: Callable[..., jax.Array] = kernels.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1, block_sizes=sizes
        )
    return made


def block(
    setup: Setup, on_tpu: bool, parameters: Mapping[str, jax.Array], x_BTD: jax.Array
) -> jax.Array:
    """One transformer block. The hidden state is float32, as autocast leaves residual sums.

    Weights that are gathered wait for the block's input: where memory is left, libtpu would gather
    those of many blocks early.
    """
    if setup.fsdp > 1:
        parameters, x_BTD = jax.lax.optimization_barrier((dict(parameters), x_BTD))
    layers = Layers(setup, parameters, "")
    y_BTD = entering(layers.norm("ln_1", x_BTD).astype(setup.dtype), TENSOR, None)
    qkv_BT3D = jnp.einsum("btd,dce->btce", y_BTD, layers.weight("attn.c_attn.weight"))
    y_BTD = attention(setup, qkv_BT3D + layers.bias("attn.c_attn.bias"), on_tpu=on_tpu)
    y_BTD = leaving(y_BTD @ layers.weight("attn.c_proj.weight"), TENSOR, None)
    x_BTD = x_BTD + (y_BTD + layers.bias("attn.c_proj.bias"))
    y_BTD = entering(layers.norm("ln_2", x_BTD).astype(setup.dtype), TENSOR, None)
    y_BTF = y_BTD @ layers.weight("mlp.c_fc.weight") + layers.bias("mlp.c_fc.bias")
    y_BTF = jax.nn.gelu(y_BTF, approximate=True)
    y_BTD = leaving(y_BTF @ layers.weight("mlp.c_proj.weight"), TENSOR, None)
    return x_BTD + (y_BTD + layers.bias("mlp.c_proj.bias"))


def look_up(setup: Setup, table_SD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """The tokens' rows of the split table, in float32: rows travel to tokens, or tokens to rows."""
    shard_of_tensor: Any = jax.lax.axis_index(TENSOR)
    x_BTD: jax.Array
    if ids_BT.size * setup.fsdp >= setup.vocabulary:
        rows_SD = gathered(table_SD, 0, np.float32)
        x_BTD = leaving(_own_rows(rows_SD, ids_BT, shard_of_tensor), TENSOR, None)
    else:
        ids_BT = jax.lax.all_gather(ids_BT, FSDP, tiled=True)
        shard = shard_of_tensor * setup.fsdp + jax.lax.axis_index(FSDP)
        x_BTD = exchanged(_own_rows(table_SD, ids_BT, shard), 0, None)
    return x_BTD


def _own_rows(rows_SD: jax.Array, ids_BT: jax.Array, shard: jax.Array) -> jax.Array:
    own = ids_BT - shard * rows_SD.shape[0]
    is_own = (own >= 0) & (own < rows_SD.shape[0])
    return jnp.where(is_own[..., None], rows_SD[jnp.where(is_own, own, 0)], np.float32(0))


# What all shards found, summed, for the own tokens; gradients of all tokens for the own rows.
exchanged = _with_gradient(
    lambda x, dim, _: jax.lax.psum(
        jax.lax.psum_scatter(x, FSDP, scatter_dimension=dim, tiled=True), TENSOR
    ),
    lambda grad, dim, _: jax.lax.all_gather(grad, FSDP, axis=dim, tiled=True),
)


def local_loss(
    setup: Setup, on_tpu: bool, parameters: Parameters, ids_BT: jax.Array, labels_BT: jax.Array
) -> jax.Array:
    """This device's part of the mean cross entropy: float32."""
    layers = Layers(setup, parameters, "transformer.")
    table_SD = parameters["transformer.wte.weight"]
    positions_TD = gathered(parameters["transformer.wpe.weight"], 0, np.float32)
    x_BTD = look_up(setup, table_SD, ids_BT) + positions_TD[: ids_BT.shape[1]]
    run: Callable[..., jax.Array] = functools.partial(block, setup, on_tpu)
    if setup.recomputes:
        run = jax.checkpoint(run)
    for i in range(setup.model.num_layers):
        prefix = f"transformer.h.{i}."
        own = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        x_BTD = run(own, x_BTD)
    x_ND = layers.norm("ln_f", x_BTD).reshape(-1, setup.model.width)
    x_ND = entering(x_ND.astype(setup.dtype), TENSOR, None)
    rows_VD = gathered(table_SD, 0, setup.dtype)  # of this shard of tensor
    logits_NV = (x_ND @ rows_VD.T).astype(np.float32)
    largest_N = jax.lax.pmax(jax.lax.stop_gradient(logits_NV).max(-1), TENSOR)
    exponentials_N = jnp.exp(logits_NV - largest_N[:, None]).sum(-1)
    total_N = largest_N + jnp.log(leaving(exponentials_N, TENSOR, None))
    first = jax.lax.axis_index(TENSOR) * rows_VD.shape[0]
    is_label = jnp.arange(rows_VD.shape[0]) + first == labels_BT.reshape(-1, 1)
    picked_N = leaving(jnp.where(is_label, logits_NV, 0).sum(-1), TENSOR, None)
    return (total_N - picked_N).sum() / (total_N.size * setup.fsdp)


# --- The step -------------------------------------------------------------------------------------


def global_norm(gradients: Parameters) -> jax.Array:
    """The norm of all gradients, of which each device has its shards: a float32 scalar."""
    total = jnp.zeros((), np.float32)
    # In an order of their own: a set's differs between processes, and so would the program.
    for axes in sorted({_split_axes(name) for name in gradients}):
        own = [jnp.sum(g * g) for name, g in gradients.items() if _split_axes(name) == axes]
        total += jax.lax.psum(sum(own), axes) if axes else sum(own)
    return jnp.sqrt(total)


def _split_axes(name: str) -> tuple[str, ...]:
    axes = {axis for entry in partition_spec(name) for axis in np.atleast_1d(entry or [])}
    return tuple(axis for axis in (FSDP, TENSOR) if axis in axes)


def adamw(state: State, gradients: Parameters, *, lr: jax.Array) -> State:
    """The step of torch.optim.AdamW; only matrices decay."""
    num_steps = state.num_steps + 1
    steps = num_steps.astype(np.float32)
    correction_1 = 1 - np.float32(BETA_1) ** steps
    correction_2_sqrt = jnp.sqrt(1 - np.float32(BETA_2) ** steps)
    parameters, mean, square = {}, {}, {}
    for name, g in gradients.items():
        mean[name] = state.mean[name] + (1 - BETA_1) * (g - state.mean[name])
        square[name] = BETA_2 * state.square[name] + (1 - BETA_2) * g * g
        decay = WEIGHT_DECAY if name.endswith("weight") and "ln_" not in name else 0.0
        parameters[name] = state.parameters[name] * (1 - lr * decay) - lr / correction_1 * mean[
            name
        ] / (jnp.sqrt(square[name]) / correction_2_sqrt + EPSILON)
    return State(parameters, mean, square, num_steps)


def local_step(
    setup: Setup,
    on_tpu: bool,
    state: State,
    ids_BT: jax.Array,
    labels_BT: jax.Array,
    lr: jax.Array,
) -> tuple[State, jax.Array, jax.Array]:
    """One step on the blocks of one device: the new state, the loss, the gradients' norm."""
    loss, gradients = jax.value_and_grad(
        lambda parameters: local_loss(setup, on_tpu, parameters, ids_BT, labels_BT)
    )(state.parameters)
    norm = global_norm(gradients)
    factor = jnp.minimum(MAX_NORM / (norm + 1e-6), 1)
    clipped = {name: g * factor for name, g in gradients.items()}
    return adamw(state, clipped, lr=lr), jax.lax.psum(loss, FSDP), norm


class Step(NamedTuple):
    """A step for some devices, and the shapes, dtypes and shardings of its arguments."""

    jitted: Any
    arguments: tuple[Any, ...]


def step_for(setup: Setup, devices: Sequence[Any]) -> Step:
    """The step on the first fsdp x tensor of the devices. Compiles nothing."""
    mesh = Mesh(
        np.array(devices[: setup.fsdp * setup.tensor]).reshape(setup.fsdp, setup.tensor),
        (FSDP, TENSOR),
    )
    shapes = parameter_shapes(setup)
    specs = {name: partition_spec(name) for name in shapes}
    state_specs = State(specs, specs, specs, PartitionSpec())  # type: ignore[arg-type]
    batch, scalar = PartitionSpec(FSDP), PartitionSpec()
    on_tpu = devices[0].platform == "tpu"
    mapped = jax.shard_map(
        functools.partial(local_step, setup, on_tpu),
        mesh=mesh,
        in_specs=(state_specs, batch, batch, scalar),
        out_specs=(state_specs, scalar, scalar),
        check_vma=False,
    )

    def abstract(size: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

    def like_parameters() -> Any:
        return {name: abstract(size, np.float32, specs[name]) for name, size in shapes.items()}

    tokens = abstract((setup.batch * setup.fsdp, setup.model.seq), np.int32, batch)
    arguments = (
        State(
            like_parameters(), like_parameters(), like_parameters(), abstract((), np.int32, scalar)
        ),
        tokens,
        tokens,
        abstract((), np.float32, scalar),
    )
    shardings = jax.tree.map(lambda x: x.sharding, arguments[0])
    whole = NamedSharding(mesh, scalar)
    jitted = jax.jit(mapped, out_shardings=(shardings, whole, whole), donate_argnums=0)
    return Step(jitted, arguments)
