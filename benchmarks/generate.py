"""How many programs does `generate()` of transformers compile, and how long does it take?

A Llama of 2 layers continues a prompt of 7 tokens, with a cache that grows and with one of fixed
size; each with a program for each length, and with programs that hold for growing sizes. The first
call compiles, the second one finds everything compiled. The tokens are compared with those of eager
torch. Programs of fewer than 40 operations, which check the inputs, are counted apart.

Run: python -m benchmarks.generate --tokens 64
"""

import argparse
import sys
import time
import warnings
from typing import Any

from benchmarks.options import num_devices, whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tokens", type=whole(), default=64, help="tokens to generate (default 64)"
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=1, help="emulated devices (default 1)"
    )
    args = parser.parse_args()

import spmd_core as spmd  # before transformers: see spmd_core.torch_backend.torchvision_ops

# isort: split
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spmd_core.program import compile_cache, growing_sizes

MAX_STATIC_PROGRAMS = 3


def main(args: argparse.Namespace) -> int:
    spmd.config.cache_dir = None
    spmd.simulate(args.devices)
    # Of transformers, on flags of generate() that do not count for greedy decoding.
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 256, (2, 7))
    measured = []
    for cache in ("dynamic", "static"):
        options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False}
        if cache == "static":
            options["cache_implementation"] = "static"
        expected = model.cpu().generate(ids, **options)
        model.to("xla")
        for bounded in (False, True):
            spmd.config.bound_growing_sizes = bounded
            found = _measure(model, ids, options)
            assert found.pop("result") == expected.tolist(), "the tokens are those of torch"
            measured.append({"cache": cache, "bounded": bounded, **found})
    rows = [
        [
            f"{m['cache']}, {'growing sizes' if m['bounded'] else 'a program for each length'}",
            str(m["programs"]),
            str(m["checks"]),
            f"{m['first_s']:.1f} s",
            f"{1e3 * m['second_s'] / args.tokens:.1f} ms",
        ]
        for m in measured
    ]
    bound = 2 + (7 + args.tokens).bit_length() - 5  # prompt, a length, capacities from 32
    reached = all(
        m["programs"] <= (bound if m["cache"] == "dynamic" else MAX_STATIC_PROGRAMS)
        for m in measured
        if m["bounded"]
    )
    notes = [
        f"{args.tokens} tokens for 2 prompts of 7, greedy, {args.devices} device(s). "
        "The tokens are those of eager torch.",
        f"{verdict(reached)}: growing sizes take at most {MAX_STATIC_PROGRAMS} programs with a "
        f"static cache, and {bound} with a dynamic one.",
    ]
    columns = ["cache", "programs", "checks of inputs", "first call", "second call, a token"]
    publish(
        "generate", Table("generate()", columns, rows, notes), {"runs": measured}, folder=args.out
    )
    return 0 if reached else 1


def _measure(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    compile_cache.clear()
    growing_sizes.clear()
    spmd.metrics.reset()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        result = model.generate(ids.to("xla"), **options).tolist()
        times.append(time.perf_counter() - start)
    sizes = [program.num_ops for program in spmd.metrics.programs()]
    return {
        "programs": sum(size >= 40 for size in sizes),
        "checks": sum(size < 40 for size in sizes),
        "first_s": times[0],
        "second_s": times[1],
        "result": result,
    }


if __name__ == "__main__":
    sys.exit(main(args))
