"""How fast is GPT-2's train step under torch.compile on one device?

The recipe's model, optimizer and clipping, without this package: what `examples.gpt2.train` is
compared with on a GPU. Prints a row: step time, tokens/s, peak memory.

Run: python -m benchmarks.compiled_gpt2 --preset 124M --dtype bf16 --device cuda
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.options import new_file, whole
from examples.gpt2.presets import PRESETS, padded_vocab

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="124M", choices=list(PRESETS), help="model size")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="of products")
    parser.add_argument("--batch", type=whole(), default=8, help="sequences in a step (default 8)")
    parser.add_argument(
        "--seq", type=whole(), default=1024, help="tokens of a sequence (default 1024)"
    )
    parser.add_argument("--steps", type=whole(), default=20, help="measured steps (default 20)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default cuda)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default inductor)")
    parser.add_argument("--results", type=new_file, help="file for the figures as JSON")
    args = parser.parse_args()

import spmd_core  # noqa: F401  (before transformers: makes torchvision importable beside CPU torch)

# isort: split
import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt2.model import build_model

NUM_WARM = 5  # steps before the measured ones: the first compiles


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, waited for, and the peak of the device's memory in bytes."""
    torch.manual_seed(0)
    device, preset = torch.device(args.device), PRESETS[args.preset]
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")  # what the gradients of float32 parts may use
    vocab = padded_vocab(preset.vocab_size, 128)
    with device:
        model = build_model(preset, vocab_size=vocab, dropout=0.0)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=on_gpu)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bf16")

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x).logits
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    loss_of = torch.compile(forward, backend=args.backend)
    tokens = torch.randint(preset.vocab_size, (args.batch, args.seq + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> torch.Tensor:
        with autocast:
            loss: torch.Tensor = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, seconds = [], []
    for number in range(NUM_WARM + args.steps):
        start = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        if number >= NUM_WARM:
            seconds.append(time.perf_counter() - start)
    return {
        "step_s": seconds,
        "tokens": args.batch * args.seq,
        "losses": [loss.item() for loss in losses],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def main(args: argparse.Namespace) -> int:
    found = measure(args)
    step_s = statistics.median(found["step_s"])
    peak = f", peak {found['peak_bytes'] / 1e9:.2f} GB" if found["peak_bytes"] else ""
    print(f"step {step_s * 1e3:.1f} ms, {found['tokens'] / step_s:,.0f} tokens/s{peak}")
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(args))
