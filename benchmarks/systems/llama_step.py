"""Llama's train step: parameters split over the axes fsdp and tensor, the batch over fsdp."""

import argparse

import jobs
import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

AXES = {"fsdp": 4, "tensor": 2}
# Of weights (out, in): the products whose columns a device computes, and those whose rows.
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
BY_ROWS = ("o_proj", "down_proj")


def job(args: argparse.Namespace) -> jobs.Job:
    """Hugging Face's Llama over int64 tokens (batch, seq), by AdamW."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.width,
        intermediate_size=args.width * 4,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq,
        tie_word_embeddings=False,
        use_cache=False,
    )
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(args.vocab, size=(args.batch, args.seq))
    )
    positions = torch.arange(args.seq)[None]
    return jobs.Job(
        axes=AXES,
        model=LlamaForCausalLM(config).train(),
        batch=(tokens, positions),
        batch_specs=(("fsdp", None), (None, None)),
        spec=spec,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def loss(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each next token."""
    logits = model(input_ids=ids, position_ids=positions).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])


def spec(name: str, tensor: torch.Tensor) -> jobs.Spec:
    """The axes of a parameter: those of its module's name; norms and the like are replicated."""
    module = name.split(".")[-2]
    if module in BY_COLUMNS:
        return ("tensor", "fsdp")
    return ("fsdp", "tensor") if module in BY_ROWS else (None,) * tensor.ndim
