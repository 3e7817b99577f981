"""How fast is the fixed GPT-2 train step as one hand-written jitted jax program?

The project's own step is compared with this one. The fixed step: GPT-2, 4 layers, width 256, 8
heads, vocabulary 8192, batch 8 x 256 tokens, no dropout, fp32, AdamW with torch's defaults,
parameters and batch sharded over 8 devices. Parameters have Hugging Face's names and shapes, so
that weights can be copied from torch and compared.

Variants by CPU time on 8 emulated CPU devices (the fastest is used; most are within 3% of each
other):
- linear layers on (batch x seq, width): 2% less than on (batch, seq, width);
- attention on (batch, heads, seq, head_dim): 3% less than einsums on (batch, seq, heads, head_dim)
  or `jax.nn.dot_product_attention`;
- activations pinned to the batch sharding: 2% less than with the partitioner's choice, which mixes
  in all-to-alls; in addition gathering all parameters by one constraint at the top: no less CPU
  time, and more memory;
- logits split along the vocabulary, like the tied table: 4% less than along the batch, as 2 MB of
  activations move instead of an 8 MB table;
- `shard_map` with an explicit all-gather and reduce-scatter per parameter: 2% more, as 52 small
  collectives replace one combined all-reduce;
- the label's logit by a gather: up to 3% less than by a one-hot product;
- the loss over padded labels: 12% more;
- the embedding as a one-hot product: 13% more;
- hand-written backward passes of layer norm and softmax: no difference beyond noise.

Run: python -m benchmarks.jax_gpt2_step --devices 8 --rounds 20
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.options import num_devices, whole

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated CPU devices (default 8)"
    )
    parser.add_argument("--rounds", type=whole(), default=20, help="timed steps (default 20)")
    args = parser.parse_args()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import trange

# torch.optim.AdamW's defaults
LEARNING_RATE, BETA_1, BETA_2, EPSILON, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2
LAYER_NORM_EPSILON = 1e-5
AXIS = "fsdp"

Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batch; the defaults are the fixed step."""

    num_layers: int = 4
    width: int = 256
    num_heads: int = 8
    vocabulary: int = 8192
    batch: int = 8
    seq: int = 256


class State(NamedTuple):
    """The arrays that a step replaces. A step donates its state: the old arrays are deleted."""

    parameters: Parameters
    mean: Parameters
    square: Parameters
    num_steps: jax.Array  # int32, completed steps


Step = Callable[[State, jax.Array], tuple[State, jax.Array]]


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes, by the names and in the order of `GPT2LMHeadModel`."""
    d = shape.width
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (shape.vocabulary, d),
        "transformer.wpe.weight": (shape.seq, d),
    }
    block = {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (d, 3 * d),
        "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, 4 * d),
        "mlp.c_fc.bias": (4 * d,),
        "mlp.c_proj.weight": (4 * d, d),
        "mlp.c_proj.bias": (d,),
    }
    for i in range(shape.num_layers):
        shapes |= {f"transformer.h.{i}.{name}": size for name, size in block.items()}
    return shapes | {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}


def largest_dim(size: tuple[int, ...], num_devices: int) -> int | None:
    """The dim along which FSDP splits a parameter, or None.

    The dim is the largest one whose size `num_devices` divides, the first among equals.
    """
    dims = [dim for dim, n in enumerate(size) if n % num_devices == 0]
    return max(dims, key=lambda dim: size[dim]) if dims else None


def partition_spec(size: tuple[int, ...], num_devices: int) -> tuple[str | None, ...]:
    """The FSDP partition spec of a parameter: one entry per dim, `"fsdp"` on `largest_dim`."""
    split = largest_dim(size, num_devices)
    return tuple(AXIS if dim == split else None for dim in range(len(size)))


def random_parameters(shape: Shape, *, seed: int = 0) -> dict[str, np.ndarray]:
    """GPT-2's initial values: float32; normal(0, 0.02) weights, biases 0, layer norm scales 1."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, size in parameter_shapes(shape).items():
        if len(size) > 1:
            result[name] = rng.normal(0, 0.02, size).astype(np.float32)
        else:
            result[name] = (
                np.ones(size, np.float32)
                if "ln_" in name and name.endswith("weight")
                else np.zeros(size, np.float32)
            )
    return result


def random_tokens(shape: Shape, *, seed: int = 1) -> np.ndarray:
    """int32 tokens of shape (batch, seq)."""
    return (
        np.random.default_rng(seed)
        .integers(0, shape.vocabulary, (shape.batch, shape.seq))
        .astype(np.int32)
    )


def layer_norm(x_BTD: jax.Array, weight_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Layer norm over the last dim, with the biased variance."""
    centered = x_BTD - x_BTD.mean(-1, keepdims=True)
    return (
        centered
        * jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
        * weight_D
        + bias_D
    )


def attention(qkv_BTE: jax.Array, *, num_heads: int) -> jax.Array:
    """Causal self-attention, where E is 3·D. Returns (B, T, D)."""
    batch, seq, width = qkv_BTE.shape[0], qkv_BTE.shape[1], qkv_BTE.shape[2] // 3
    head_dim = width // num_heads
    q_BHTK, k_BHSK, v_BHSK = (
        t.reshape(batch, seq, num_heads, head_dim).transpose(0, 2, 1, 3)
        for t in jnp.split(qkv_BTE, 3, axis=-1)
    )
    scores_BHTS = jnp.einsum("bhtk,bhsk->bhts", q_BHTK, k_BHSK) * np.float32(
        1 / math.sqrt(head_dim)
    )
    causal_TS = jnp.tril(jnp.ones((seq, seq), dtype=bool))
    weights_BHTS = jax.nn.softmax(
        jnp.where(causal_TS, scores_BHTS, jnp.finfo(jnp.float32).min), axis=-1
    )
    return (
        jnp.einsum("bhts,bhsk->bhtk", weights_BHTS, v_BHSK)
        .transpose(0, 2, 1, 3)
        .reshape(batch, seq, width)
    )


def linear(x_BTD: jax.Array, weight_DF: jax.Array, bias_F: jax.Array) -> jax.Array:
    """A linear layer as one matrix product over all tokens. Returns (B, T, F)."""
    flat = x_BTD.reshape(-1, x_BTD.shape[-1]) @ weight_DF + bias_F
    return flat.reshape(*x_BTD.shape[:-1], -1)


def loss_fn(
    parameters: Mapping[str, jax.Array], tokens_BT: jax.Array, *, shape: Shape, mesh: Mesh
) -> jax.Array:
    """The mean cross entropy of the next tokens: a float32 scalar.

    The head is tied to the token embedding.
    """

    def pinned(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    p = parameters
    wte_VD = p["transformer.wte.weight"]
    x_BTD = pinned(wte_VD[tokens_BT] + p["transformer.wpe.weight"][: tokens_BT.shape[1]], AXIS)
    for i in range(shape.num_layers):
        h = f"transformer.h.{i}."
        y_BTD = layer_norm(x_BTD, p[h + "ln_1.weight"], p[h + "ln_1.bias"])
        y_BTD = attention(
            linear(y_BTD, p[h + "attn.c_attn.weight"], p[h + "attn.c_attn.bias"]),
            num_heads=shape.num_heads,
        )
        x_BTD = pinned(
            x_BTD + linear(y_BTD, p[h + "attn.c_proj.weight"], p[h + "attn.c_proj.bias"]), AXIS
        )
        y_BTD = layer_norm(x_BTD, p[h + "ln_2.weight"], p[h + "ln_2.bias"])
        y_BTF = jax.nn.gelu(
            linear(y_BTD, p[h + "mlp.c_fc.weight"], p[h + "mlp.c_fc.bias"]), approximate=True
        )
        x_BTD = pinned(
            x_BTD + linear(y_BTF, p[h + "mlp.c_proj.weight"], p[h + "mlp.c_proj.bias"]), AXIS
        )
    x_BTD = layer_norm(x_BTD, p["transformer.ln_f.weight"], p["transformer.ln_f.bias"])
    # The head is split along the vocabulary, like its table: every device sees all
    # N = batch x (seq - 1) tokens, and the table does not move.
    x_ND = pinned(pinned(x_BTD[:, :-1], AXIS)).reshape(-1, shape.width)
    logits_NV = pinned(x_ND @ wte_VD.T, None, AXIS if shape.vocabulary % mesh.size == 0 else None)
    labels_N = pinned(tokens_BT)[:, 1:].reshape(-1)
    picked_N = jnp.take_along_axis(logits_NV, labels_N[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits_NV, axis=-1) - picked_N).mean()


def adamw(state: State, gradients: Parameters) -> State:
    """The step of torch.optim.AdamW, with torch's order of operations.

    Source: Loshchilov and Hutter 2019, decoupled weight decay.
    """
    num_steps = state.num_steps + 1
    steps = num_steps.astype(jnp.float32)
    # 1 - beta**t loses half of its digits in float32 at t = 1; expm1 keeps them.
    correction_1 = -jnp.expm1(steps * np.float32(math.log(BETA_1)))
    correction_2_sqrt = jnp.sqrt(-jnp.expm1(steps * np.float32(math.log(BETA_2))))
    parameters, mean, square = {}, {}, {}
    for name, g in gradients.items():
        mean[name] = state.mean[name] + (1 - BETA_1) * (g - state.mean[name])
        square[name] = BETA_2 * state.square[name] + (1 - BETA_2) * g * g
        decayed = state.parameters[name] * (1 - LEARNING_RATE * WEIGHT_DECAY)
        parameters[name] = decayed - LEARNING_RATE / correction_1 * mean[name] / (
            jnp.sqrt(square[name]) / correction_2_sqrt + EPSILON
        )
    return State(parameters, mean, square, num_steps)


def build(
    num_devices: int,
    *,
    shape: Shape | None = None,
    parameters: Mapping[str, np.ndarray] | None = None,
    tokens: np.ndarray | None = None,
) -> tuple[Step, State, jax.Array]:
    """Compiles the step for the first `num_devices` devices.

    Args:
        num_devices: number of devices to shard over; must divide the batch.
        shape: the sizes; None: those of the fixed step.
        parameters: initial float32 values by Hugging Face's names; None: GPT-2's random initial
            values.
        tokens: integers of shape (batch, seq); None: random.

    Returns:
        `step(state, batch) -> (new state, loss)`, which donates its state; the initial state; and
        the batch. State and batch are on the devices.

    Raises:
        ValueError: jax has fewer devices, or `num_devices` does not divide the batch.
    """
    shape = shape or Shape()
    if num_devices > jax.device_count():
        raise ValueError(
            f"{num_devices} devices were asked for and jax has {jax.device_count()}; "
            "set jax_num_cpu_devices before jax starts."
        )
    if shape.batch % num_devices:
        raise ValueError(
            f"the batch is split over the devices: {shape.batch} sequences do not divide by "
            f"{num_devices}."
        )
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(*partition_spec(size, num_devices)))
        for name, size in parameter_shapes(shape).items()
    }
    replicated = NamedSharding(mesh, PartitionSpec())
    # The tree of shardings has the class of the state's tree.
    state_sharding = State(shardings, shardings, shardings, replicated)  # type: ignore[arg-type]
    batch_sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def step(state: State, tokens_BT: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: loss_fn(p, tokens_BT, shape=shape, mesh=mesh)
        )(state.parameters)
        gradients = {
            name: jax.lax.with_sharding_constraint(g, shardings[name])
            for name, g in gradients.items()
        }
        return adamw(state, gradients), loss

    values = dict(parameters) if parameters is not None else random_parameters(shape)
    ids = tokens if tokens is not None else random_tokens(shape)
    state = State(
        {
            name: jax.device_put(np.asarray(values[name], np.float32), s)
            for name, s in shardings.items()
        },
        {
            name: jax.device_put(np.zeros(values[name].shape, np.float32), s)
            for name, s in shardings.items()
        },
        {
            name: jax.device_put(np.zeros(values[name].shape, np.float32), s)
            for name, s in shardings.items()
        },
        jax.device_put(np.int32(0), replicated),
    )
    batch = jax.device_put(np.asarray(ids, np.int32), batch_sharding)
    jitted = jax.jit(
        step,
        in_shardings=(state_sharding, batch_sharding),
        out_shardings=(state_sharding, replicated),
        donate_argnums=0,
    )
    return jitted.lower(state, batch).compile(), state, batch


def main(args: argparse.Namespace) -> None:

    jax.config.update("jax_num_cpu_devices", args.devices)
    start = time.perf_counter()
    step, state, batch = build(args.devices)
    print(f"built and compiled in {time.perf_counter() - start:.1f} s")
    walls, cpus = [], []
    for i in trange(args.rounds + 2, desc="steps", disable=None):
        wall, cpu = time.perf_counter(), time.process_time()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        if i >= 2:  # the first executions grow the allocator's arenas
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
    for name, values in (("wall", walls), ("cpu", cpus)):
        print(
            f"{name}: median {statistics.median(values) * 1e3:.0f} ms, "
            f"min {min(values) * 1e3:.0f} ms"
        )
    print(f"loss after {args.rounds + 2} steps on one batch: {float(loss):.4f}")


if __name__ == "__main__":
    main(args)
