"""What the programs of this folder share: sizes, model, tokens, specs, the timing of operations.

The interpreters of other systems run these files by their path. So they import nothing of this
project, and the folder is no package.
"""

import argparse
import runpy
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

NUM_WARM = 4  # steps: the first makes the optimizer's state, and two or three programs compile
SETTLE_S = 0.05  # XLA's threads spin for a while after their work
COUNT, REPEATS = 1000, 10  # of single operations
OPERATIONS = Path(__file__).parents[1] / "single_operations.py"


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


def best_us(make: Callable[..., torch.Tensor]) -> dict[str, float]:
    """This thread's CPU time of each of `single_operations.py`, in us: the best of the repeats.

    Args:
        make: a tensor of ones of these sizes on the device.
    """
    operations = runpy.run_path(str(OPERATIONS))["OPERATIONS"]
    found: dict[str, float] = {}
    for _ in range(REPEATS):
        for name, of in operations.items():
            record = of(make)
            start = time.thread_time()
            for _ in range(COUNT):
                record()
            us = (time.thread_time() - start) / COUNT * 1e6
            found[name] = min(us, found.get(name, us))
            del record
    return found
