"""How fast is the Llama recipe's train step as one hand-written jitted jax program?

The project's own step is compared with this one (`fixed_llama_step.py`). It computes what a step of
`examples/llama_tp/train.py` computes with `--mesh fsdp=4,tensor=2 --sequence-parallel
--loss-parallel`: rotary positions, grouped heads, RMSNorm, SwiGLU, a cross entropy over logits that
stay split, clipping by the global norm of all gradients, and AdamW, in float32. Parameters have
Hugging Face's names, shapes and shardings, so that weights can be copied from torch and compared.

What is kept from forward to backward is a choice between memory and time. The recipe's step drops
what it has gathered, parameters and sequences, and the probabilities of attention, and makes them
again in the backward, as FSDP, sequence parallelism and flash attention do. So does this program
with `keeps_nothing_gathered`; without it, it keeps all that autodiff would.

Legend: B sequences, T tokens, V vocabulary, D width, F hidden size of an MLP, H heads, G heads of
keys and values, R heads that share one of these, K head dim, N = B x T.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.jax_gpt2_step import Parameters, State
from examples.llama_tp.presets import PRESETS, ModelPreset

FSDP, TENSOR = "fsdp", "tensor"
Step = Callable[..., tuple[State, jax.Array]]
LEARNING_RATE, BETA_1, BETA_2, EPSILON, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
_KEPT = "kept"  # the name, in the backward's policy, of what it does not make again
NORM_EPSILON, THETA = 1e-6, 10_000.0  # transformers' defaults


@dataclass(frozen=True)
class Setup:
    """What is trained, and over what.

    Attributes:
        model: the sizes; its batch and its length of sequences count, too.
        fsdp: shards of batch, parameters, gradients and optimizer state.
        tensor: shards of heads, hidden units, vocabulary, and of sequences between layers.
        keeps_nothing_gathered: whether the backward gathers parameters and sequences again, and
            computes the probabilities of attention again, as the recipe's step does.
    """

    model: ModelPreset = PRESETS["tiny"]
    fsdp: int = 4
    tensor: int = 2
    keeps_nothing_gathered: bool = True

    @property
    def num_devices(self) -> int:
        return self.fsdp * self.tensor

    @property
    def head_dim(self) -> int:
        return self.model.width // self.model.num_heads


# By the end of the name, how each dim is split.
_SPECS = {
    "embed_tokens.weight": (TENSOR, FSDP),
    "q_proj.weight": (TENSOR, FSDP),
    "k_proj.weight": (TENSOR, FSDP),
    "v_proj.weight": (TENSOR, FSDP),
    "o_proj.weight": (FSDP, TENSOR),
    "gate_proj.weight": (TENSOR, FSDP),
    "up_proj.weight": (TENSOR, FSDP),
    "down_proj.weight": (FSDP, TENSOR),
    "norm.weight": (None,),
    "lm_head.weight": (TENSOR, FSDP),
}


def partition_spec(name: str) -> PartitionSpec:
    """How a parameter is split."""
    return PartitionSpec(*next(spec for end, spec in _SPECS.items() if name.endswith(end)))


def parameter_shapes(model: ModelPreset) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes, by the names and in the order of `LlamaForCausalLM`."""
    d, f, v = model.width, model.hidden, model.vocab_size
    k = d // model.num_heads * model.num_kv_heads
    block = {
        "self_attn.q_proj.weight": (d, d),
        "self_attn.k_proj.weight": (k, d),
        "self_attn.v_proj.weight": (k, d),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(model.num_layers):
        shapes |= {f"model.layers.{i}.{name}": size for name, size in block.items()}
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (v, d)}


# --- The model ------------------------------------------------------------------------------------


def kept(x: jax.Array) -> jax.Array:
    """A value that the backward reads as the forward computed it."""
    return checkpoint_name(x, _KEPT)


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array) -> jax.Array:
    """Each row over the root of its mean square."""
    factor = kept(jax.lax.rsqrt(jnp.mean(x_BTD * x_BTD, -1, keepdims=True) + NORM_EPSILON))
    return kept(kept(x_BTD * factor) * weight_D)


def rotated(x_BHTK: jax.Array, cos_TK: jax.Array, sin_TK: jax.Array) -> jax.Array:
    """Rotary positions: pairs of a head's first and second half are turned by their angles."""
    first, second = jnp.split(x_BHTK, 2, axis=-1)
    return x_BHTK * cos_TK + jnp.concatenate([-second, first], axis=-1) * sin_TK


def linear(x_BTD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """A linear layer without bias, as one matrix product over all tokens."""
    flat = x_BTD.reshape(-1, x_BTD.shape[-1]) @ weight_FD.T
    return flat.reshape(*x_BTD.shape[:-1], -1)


def attention(q_BTE: jax.Array, k_BTE: jax.Array, v_BTE: jax.Array, setup: Setup) -> jax.Array:
    """Causal attention, in which R = H / G heads read the same keys and values: (B, T, D)."""
    batch, seq, width = q_BTE.shape
    dim, groups = setup.head_dim, setup.model.num_kv_heads
    angles_TK = jnp.asarray(_angles(seq, dim))
    cos_TK, sin_TK = jnp.cos(angles_TK), jnp.sin(angles_TK)
    q_BHTK, k_BGSK, v_BGSK = (
        x.reshape(batch, seq, -1, dim).swapaxes(1, 2) for x in (q_BTE, k_BTE, v_BTE)
    )
    q_BHTK, k_BGSK = (kept(rotated(x, cos_TK, sin_TK)) for x in (q_BHTK, k_BGSK))
    v_BGSK = kept(v_BGSK)
    q_BGRTK = q_BHTK.reshape(batch, groups, -1, seq, dim)
    # With a policy that saves nothing, the backward computes scores and softmax again.
    attend = jax.checkpoint(_attended) if setup.keeps_nothing_gathered else _attended
    out_BGRTK = attend(q_BGRTK, k_BGSK, v_BGSK)
    return kept(out_BGRTK.reshape(batch, -1, seq, dim).swapaxes(1, 2).reshape(batch, seq, width))


def _attended(q_BGRTK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array) -> jax.Array:
    seq, dim = k_BGSK.shape[-2:]
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK) * np.float32(1 / math.sqrt(dim))
    causal_TS = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal_TS, scores, jnp.finfo(np.float32).min), axis=-1)
    return jnp.einsum("bgrts,bgsk->bgrtk", weights, v_BGSK)


def _angles(seq: int, dim: int) -> np.ndarray:
    """Of each position and element of a head: float32 (seq, dim)."""
    inverse = 1 / THETA ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    half = np.arange(seq, dtype=np.float32)[:, None] * inverse
    return np.concatenate([half, half], axis=-1).astype(np.float32)


def loss_fn(
    parameters: Mapping[str, jax.Array],
    tokens_BT: jax.Array,
    labels_BT: jax.Array,
    *,
    setup: Setup,
    mesh: Mesh,
) -> jax.Array:
    """The mean cross entropy: a float32 scalar."""

    def pinned(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def weight(name: str, value: jax.Array) -> jax.Array:
        """A parameter, gathered over fsdp."""
        return pinned(value, *(None if axis == FSDP else axis for axis in partition_spec(name)))

    def attended(x_BTD: jax.Array, own: Parameters) -> jax.Array:
        p = {name: weight(name, value) for name, value in own.items()}
        y_BTD = pinned(rms_norm(x_BTD, p["input_layernorm.weight"]), FSDP)
        q, k, v = (linear(y_BTD, p[f"self_attn.{n}_proj.weight"]) for n in "qkv")
        q, k, v = (pinned(x, FSDP, None, TENSOR) for x in (q, k, v))
        y_BTD = linear(attention(q, k, v, setup), p["self_attn.o_proj.weight"])
        return x_BTD + pinned(y_BTD, FSDP, TENSOR)

    def transformed(x_BTD: jax.Array, own: Parameters) -> jax.Array:
        p = {name: weight(name, value) for name, value in own.items()}
        y_BTD = pinned(rms_norm(x_BTD, p["post_attention_layernorm.weight"]), FSDP)
        gate_BTF = kept(pinned(linear(y_BTD, p["mlp.gate_proj.weight"]), FSDP, None, TENSOR))
        up_BTF = kept(pinned(linear(y_BTD, p["mlp.up_proj.weight"]), FSDP, None, TENSOR))
        hidden_BTF = kept(kept(jax.nn.silu(gate_BTF)) * up_BTF)
        y_BTD = linear(hidden_BTF, p["mlp.down_proj.weight"])
        return x_BTD + pinned(y_BTD, FSDP, TENSOR)

    def logits(x_BTD: jax.Array, own: Parameters) -> jax.Array:
        p = {name: weight(name, value) for name, value in own.items()}
        y_BTD = pinned(rms_norm(x_BTD, p["model.norm.weight"]), FSDP)
        return pinned(linear(y_BTD, p["lm_head.weight"]), FSDP, None, TENSOR)

    def part(function: Callable[..., jax.Array], x: jax.Array, prefix: str, *of: str) -> jax.Array:
        if setup.keeps_nothing_gathered:
            policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
            function = jax.checkpoint(function, policy=policy)
        own = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        return function(x, {name: p for name, p in own.items() if name.startswith(of)})

    table_VD = weight("embed_tokens.weight", parameters["model.embed_tokens.weight"])
    x_BTD = pinned(table_VD[tokens_BT], FSDP, TENSOR)
    for i in range(setup.model.num_layers):
        h = f"model.layers.{i}."
        x_BTD = part(attended, x_BTD, h, "input_layernorm", "self_attn")
        x_BTD = part(transformed, x_BTD, h, "post_attention_layernorm", "mlp")
    logits_BTV = part(logits, x_BTD, "", "model.norm", "lm_head")
    picked_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT).mean()


# --- The step -------------------------------------------------------------------------------------


def clipped(gradients: Parameters) -> Parameters:
    """The gradients, scaled down to the largest norm."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients.values()))
    factor = jnp.minimum(MAX_NORM / (norm + 1e-6), 1)
    return {name: g * factor for name, g in gradients.items()}


def adamw(state: State, gradients: Parameters) -> State:
    """The step of torch.optim.AdamW; matrices alone decay."""
    num_steps = state.num_steps + 1
    steps = num_steps.astype(np.float32)
    # 1 - beta**t loses half of its digits in float32 at t = 1; expm1 keeps them.
    correction_1 = -jnp.expm1(steps * np.float32(math.log(BETA_1)))
    correction_2_sqrt = jnp.sqrt(-jnp.expm1(steps * np.float32(math.log(BETA_2))))
    parameters, mean, square = {}, {}, {}
    for name, g in gradients.items():
        mean[name] = state.mean[name] + (1 - BETA_1) * (g - state.mean[name])
        square[name] = BETA_2 * state.square[name] + (1 - BETA_2) * g * g
        decay = WEIGHT_DECAY if g.ndim > 1 else 0.0
        parameters[name] = state.parameters[name] * (1 - LEARNING_RATE * decay) - (
            LEARNING_RATE / correction_1 * mean[name]
        ) / (jnp.sqrt(square[name]) / correction_2_sqrt + EPSILON)
    return State(parameters, mean, square, num_steps)


def build(
    setup: Setup, parameters: Mapping[str, np.ndarray], tokens: np.ndarray, labels: np.ndarray
) -> tuple[Step, State, tuple[jax.Array, jax.Array]]:
    """Compiles the step for the first fsdp x tensor devices.

    Args:
        setup: sizes.
        parameters: initial float32 values by Hugging Face's names.
        tokens, labels: integers of shape (batch, seq).

    Returns:
        `step(state, tokens, labels) -> (new state, loss)`, which donates its state; the initial
        state; and the batch. State and batch are on the devices.
    """
    mesh = Mesh(
        np.array(jax.devices()[: setup.num_devices]).reshape(setup.fsdp, setup.tensor),
        (FSDP, TENSOR),
    )
    shardings = {name: NamedSharding(mesh, partition_spec(name)) for name in parameters}
    replicated = NamedSharding(mesh, PartitionSpec())
    batch_sharding = NamedSharding(mesh, PartitionSpec(FSDP))
    # The tree of shardings has the class of the state's tree.
    state_sharding = State(shardings, shardings, shardings, replicated)  # type: ignore[arg-type]

    def step(state: State, tokens_BT: jax.Array, labels_BT: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(
            lambda p: loss_fn(p, tokens_BT, labels_BT, setup=setup, mesh=mesh)
        )(state.parameters)
        gradients = {
            name: jax.lax.with_sharding_constraint(g, shardings[name])
            for name, g in gradients.items()
        }
        return adamw(state, clipped(gradients)), loss

    def placed(value: np.ndarray, name: str) -> jax.Array:
        return jax.device_put(np.asarray(value, np.float32), shardings[name])

    def zeros() -> Parameters:
        return {name: placed(np.zeros(p.shape), name) for name, p in parameters.items()}

    state = State(
        {name: placed(p, name) for name, p in parameters.items()},
        zeros(),
        zeros(),
        jax.device_put(np.int32(0), replicated),
    )
    batch = (
        jax.device_put(np.asarray(tokens, np.int32), batch_sharding),
        jax.device_put(np.asarray(labels, np.int32), batch_sharding),
    )
    jitted = jax.jit(
        step,
        in_shardings=(state_sharding, batch_sharding, batch_sharding),
        out_shardings=(state_sharding, replicated),
        donate_argnums=0,
    )
    # XLA's CPU backend would else drop the barriers of jax.checkpoint, and keep what was gathered.
    keeps_barriers: dict[str, str | bool] = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    options = keeps_barriers if setup.keeps_nothing_gathered else None
    return jitted.lower(state, *batch).compile(compiler_options=options), state, batch
