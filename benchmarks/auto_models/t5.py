"""transformers' T5, an encoder and a decoder, on pairs of sequences of random tokens.

Legend: B pairs, T tokens of a sequence, D width, F the MLP's hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.auto_models.manual import HIDDEN, by_rules
from benchmarks.auto_models.model import Built, Model, adamw, tokens, train_step
from examples.gpt2.shardings import LOGITS_BTV, Spec
from examples.training.attention import CAUSAL_SDPA
from examples.training.remat import recompute

# By size: layers of each side, width, hidden size, heads, their size, vocabulary, pairs of a batch,
# length, and whether blocks compute again in the backward. 220M, 770M and 3B are T5 1.0's.
SIZES = {
    "tiny": (2, 32, 64, 4, 8, 128, 8, 16, False),
    "small": (3, 256, 1024, 8, 32, 4096, 8, 128, False),
    "220M": (12, 768, 3072, 12, 64, 32128, 128, 512, False),
    "770M": (24, 1024, 4096, 16, 64, 32128, 128, 512, True),
    "3B": (24, 1024, 16384, 32, 128, 32128, 128, 512, True),
}


def sequence_loss(model: nn.Module, x_BT: Tensor, before_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Mean cross entropy of the decoder's next tokens."""
    logits_BTV = model(input_ids=x_BT, decoder_input_ids=before_BT).logits
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), y_BT.flatten())


def build(size: str, device: str | torch.device) -> Built:
    """See `benchmarks.auto_models`.

    The inputs are the encoder's tokens, the decoder's, and what follows those, each (B, T).
    """
    num_layers, width, hidden, num_heads, head, vocab_size, batch, length, again = SIZES[size]
    config = T5Config(
        vocab_size=vocab_size,
        d_model=width,
        d_kv=head,
        d_ff=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
        attn_implementation=CAUSAL_SDPA,  # which asks the module, and the encoder's are not causal
    )
    with torch.device(device):
        model = T5ForConditionalGeneration(config).train()
    if again:
        recompute([*model.encoder.block, *model.decoder.block], "full")
    optimizer = adamw(model, lr=3e-4)
    step = train_step(model, optimizer, sequence_loss, is_bf16=size not in ("tiny", "small"))
    x, before, y = (tokens(vocab_size, (batch, length), device) for _ in range(3))
    return model, optimizer, step, (x, before, y)


# Linear weights are (out, in).
PARAMETERS: dict[str, Spec] = {
    r"(shared|lm_head)\.weight": (("tensor", "fsdp"), None),  # (V, D)
    r".*\.(q|k|v|wi)\.weight": ("tensor", "fsdp"),
    r".*\.(o|wo)\.weight": ("fsdp", "tensor"),
    r".*\.relative_attention_bias\.weight": (None, "tensor"),  # (distances, heads)
    r".*norm\.weight": (None,),
}
OUTPUTS: dict[str, Spec] = {
    r"(encoder|decoder)\.(block\.\d+|final_layer_norm)": HIDDEN,
    r"lm_head": LOGITS_BTV,
}
MODEL = Model("t5", tuple(SIZES), build, by_rules(PARAMETERS, OUTPUTS))
