"""GPT-2's train step: parameters and batch split over one axis, fsdp."""

import argparse

import jobs
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

AXES = {"fsdp": 4}


def job(args: argparse.Namespace) -> jobs.Job:
    """Hugging Face's GPT-2 over int64 tokens (batch, seq), by AdamW."""
    model, tokens = model_and_tokens(args)
    return jobs.Job(
        axes=AXES,
        model=model,
        batch=(tokens, torch.arange(args.seq)[None]),
        batch_specs=(("fsdp", None), (None, None)),
        spec=lambda name, tensor: partition_spec(tuple(tensor.shape), AXES["fsdp"]),
        loss=lambda model, ids, at: model(input_ids=ids, labels=ids, position_ids=at).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def model_and_tokens(args: argparse.Namespace) -> tuple[GPT2LMHeadModel, torch.Tensor]:
    """Hugging Face's GPT-2 from a fixed seed, and int64 tokens (batch, seq), on the CPU."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.heads,
        vocab_size=args.vocab,
        n_positions=args.seq,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = np.random.default_rng(0).integers(args.vocab, size=(args.batch, args.seq))
    return model, torch.from_numpy(tokens)


def partition_spec(shape: tuple[int, ...], num_devices: int) -> tuple[str | None, ...]:
    """Splits the largest dim that divides evenly."""
    dims = [d for d in range(len(shape)) if shape[d] % num_devices == 0]
    if num_devices == 1 or not dims:
        return (None,) * len(shape)
    largest = max(dims, key=lambda d: shape[d])
    return tuple("fsdp" if d == largest else None for d in range(len(shape)))
