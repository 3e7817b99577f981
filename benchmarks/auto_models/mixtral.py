"""transformers' Mixtral, a Llama whose MLPs are experts, on sequences of random tokens.

Legend: B sequences, T tokens, D width, E experts, F their hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import spmd_core as spmd
from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.model import Built, Model, adamw, tokens, train_step
from examples.gpt2.presets import BATCH_AXES
from examples.gpt2.shardings import LOGITS_BTV, Spec, on_mesh
from examples.llama_tp.model import next_token_loss
from examples.training.attention import CAUSAL_SDPA
from examples.training.remat import recompute

# By size: layers, width, hidden size, heads, heads of keys and values, experts, vocabulary,
# sequences of a batch, length, and whether blocks compute again in the backward.
SIZES = {
    "tiny": (2, 32, 64, 4, 2, 4, 128, 8, 16, False),
    "small": (4, 256, 512, 8, 4, 4, 4096, 8, 128, False),
    "8x160M": (12, 768, 2048, 12, 4, 8, 32000, 64, 1024, True),
}


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`; the inputs are tokens (B, T), and what follows each."""
    (*dims, vocab_size, batch, length, is_recomputed) = SIZES[size]
    num_layers, width, hidden, num_heads, num_kv_heads, num_experts = dims
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=CAUSAL_SDPA,
        experts_implementation="grouped_mm",
    )
    with torch.device(device):
        model = MixtralForCausalLM(config).train()
    if is_recomputed:
        recompute(model.model.layers, "full")
    optimizer = adamw(model, lr=3e-4)
    step = train_step(model, optimizer, next_token_loss, is_bf16=size not in ("tiny", "small"))
    x, y = (tokens(vocab_size, (batch, length), device) for _ in range(2))
    return model, optimizer, step, (x, y)


# Gates and their factors are halves of one dim, which no axis splits evenly in each half: the axis
# tensor splits experts as fsdp does.
WEIGHT_AXES = ("tensor", "fsdp")
UP: Spec = (None, None, WEIGHT_AXES)
DOWN: Spec = (None, WEIGHT_AXES, None)
TOKENS: Spec = ((*BATCH_AXES, "tensor"), None)
# Linear weights are (out, in); those of experts (E, out, in).
PARAMETERS: dict[str, Spec] = {
    r"(model\.embed_tokens|lm_head)\.weight": (("tensor", "fsdp"), None),
    r".*\.[qkv]_proj\.weight": ("tensor", "fsdp"),
    r".*\.o_proj\.weight": ("fsdp", "tensor"),
    r".*\.gate_up_proj": UP,
    r".*\.down_proj": DOWN,
    r".*(gate|norm)\.weight": (None,),
}
OUTPUTS: dict[str, Spec] = {
    r"model\.(embed_tokens|layers\.\d+|norm)": HIDDEN,
    r"lm_head": LOGITS_BTV,
}
BY_RULES = by_rules(PARAMETERS, OUTPUTS)


def on_local_tokens(
    experts: nn.Module, mesh: spmd.Mesh
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The forward of a layer's experts, in which each device sorts a part of the tokens alone.

    Tokens are sorted by their expert before the products. Sorted over all devices, they would all
    have to move. So a device gathers the weights, and its gradients are reduce-scattered.

    Args:
        experts: takes tokens (B·T, D), the experts that each goes to, and their shares.
        mesh: the mesh, of which all axes split the tokens.
    """
    inner = copy.copy(experts)  # whose forward stays
    axes = tuple(axis for axis in WEIGHT_AXES if axis in mesh.shape())

    def local(*args: Tensor) -> Tensor:
        *tokens, up, down = args
        if axes:
            up, down = (spmd.manual.all_gather(w, axes, d) for w, d in ((up, 2), (down, 1)))
        weights = {"gate_up_proj": up, "down_proj": down}
        result: Tensor = torch.func.functional_call(inner, weights, tuple(tokens))
        return result

    rows, up, down = (on_mesh(spec, mesh) for spec in (TOKENS, UP, DOWN))
    mapped = spmd.shard_map(local, mesh, [rows, rows, rows, up, down], rows)
    return lambda *tokens: mapped(*tokens, experts.gate_up_proj, experts.down_proj)


def shard(model: nn.Module, inputs: tuple[Tensor, ...], mesh: spmd.Mesh) -> None:
    """Marks by rules, and experts whose tokens stay where they are."""
    BY_RULES["fsdp"](model, inputs, mesh)
    for module in model.modules():
        if isinstance(module, MixtralExperts):
            module.forward = on_local_tokens(module, mesh)


MODEL = Model("mixtral", tuple(SIZES), build, dict.fromkeys(BY_RULES, shard))
