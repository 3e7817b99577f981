"""How fast does the Llama server answer many clients, and is its memory flat over many requests?

The server is `python -m examples.llama_serving.serve`, in a process of its own, with a random model
and a tokenizer of one character for each token. Clients stream over HTTP: each asks for a text
again and again until its share of the requests is done. Time to the first token and from a token to
the next one are seen by the clients; the host's and the device's part of a decode step are the
server's own figures, at /metrics. Then thousands of tiny requests, while the server's memory is
read.

Run: python -m benchmarks.serving --devices 8
"""

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.options import num_devices, num_layers, whole
from benchmarks.report import Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--devices", type=num_devices(), default=8, help="emulated devices (default 8)"
    )
    parser.add_argument("--width", type=whole(), default=512, help="hidden size (default 512)")
    parser.add_argument("--layers", type=num_layers(), default=4, help="layers (default 4)")
    parser.add_argument(
        "--clients",
        type=whole(),
        nargs="+",
        default=[1, 4, 16, 64],
        help="numbers of clients at once",
    )
    parser.add_argument(
        "--tiny", type=whole(), default=10_000, help="tiny requests for the memory (default 10,000)"
    )
    args = parser.parse_args()

import spmd_core  # noqa: F401  (before transformers, as in its recipes)

# isort: split
import httpx2
import psutil  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
VOCAB, SLOTS, LENGTH = 2048, 16, 256
PROMPT_TOKENS, ANSWER_TOKENS = 24, 64
MAX_GROWTH_BYTES = 16 << 20  # of resident memory, over all tiny requests but the first tenth


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), width=args.width, layers=args.layers)
        with server(folder, args.devices) as (url, _):
            runs = [asyncio.run(measured(url, clients)) for clients in args.clients]
            compiles = figures(url)["llama_compiles"]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), width=64, layers=2)
        with server(folder, args.devices) as (url, process):
            at_start = figures(url)["llama_compiles"]
            memory = asyncio.run(memory_over(url, process, args.tiny))
            tiny_compiles = figures(url)["llama_compiles"] - at_start
    rows = [
        [
            str(run["clients"]),
            f"{run['tokens_per_s']:.0f}",
            *(
                f"{1e3 * run[name][part]:.0f} ms"
                for name in ("first_s", "token_s")
                for part in ("median", "p95")
            ),
            f"{1e3 * run['host_s']:.1f} ms",
            f"{1e3 * run['device_s']:.1f} ms",
        ]
        for run in runs
    ]
    growth = memory["rss_bytes"][-1] - memory["rss_bytes"][1]
    hidden = all(run["host_s"] < run["device_s"] for run in runs)
    compiled = sum(run["compiles"] for run in runs) + tiny_compiles
    flat = growth <= MAX_GROWTH_BYTES
    notes = [
        f"A Llama of {args.layers} layers, width {args.width}, in float32, tensor={args.devices} "
        f"on emulated devices, {SLOTS} slots of {LENGTH} tokens; prompts of {PROMPT_TOKENS}, "
        f"answers of {ANSWER_TOKENS} tokens, at temperature 1. Clients, server and devices "
        "share the cores of one machine.",
        f"{verdict(compiled == 0)}: no request compiled anything; {compiles:.0f} programs at the "
        "start.",
        f"{verdict(hidden)}: the host's part of a decode step, in CPU time, is smaller than the "
        "device's.",
        f"{verdict(flat)}: over {args.tiny:,} tiny requests, {memory['per_s']:.0f} a second, the "
        f"server's memory grew by {growth / 1e6:.1f} MB after the first tenth, from "
        f"{memory['rss_bytes'][1] / 1e6:.0f} MB.",
    ]
    columns = ["clients", "tokens/s", "first token, median", "p95", "next token, median", "p95"]
    columns += ["host, a step", "device, a step"]
    options = {name: value for name, value in vars(args).items() if name != "out"}
    data = {"options": options, "runs": runs, "memory": memory}
    publish("serving", Table("Serving a Llama", columns, rows, notes), data, folder=args.out)
    return 0 if hidden and flat and compiled == 0 else 1


def save_model(folder: Path, *, width: int, layers: int) -> None:
    """A random Llama that never ends a text, and a tokenizer whose tokens are characters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({chr(0x4E00 + i): i for i in range(VOCAB)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def server(folder: str, devices: int) -> Any:
    """A running server: its address and its process."""
    command = [
        sys.executable,
        "-m",
        "examples.llama_serving.serve",
        "--model",
        folder,
        "--port",
        "0",
    ]
    command += ["--slots", str(SLOTS), "--devices", str(devices)]
    command += ["--mesh", f"tensor={devices}"] if devices > 1 else []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            found = re.search(r"at (http://\S+);", line)
            if found:
                break
        if found is None:
            raise RuntimeError("the server ended before it served; its error is above")
        yield found[1], psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()


def figures(url: str) -> dict[str, float]:
    """The server's figures that have no label."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    parts = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in parts}


async def measured(url: str, clients: int) -> dict[str, Any]:
    """Rates and latencies with so many clients at once."""
    requests_each = max(2, 16 // clients)
    first_s: list[float] = []
    token_s: list[float] = []
    before = figures(url)

    async def client(number: int) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
            for turn in range(requests_each):
                prompt = [(7 * number + turn + i) % VOCAB for i in range(PROMPT_TOKENS)]
                asked = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True, "seed": 1}
                last_s = time.perf_counter()
                is_first = True
                async with http.stream("POST", "/v1/completions", json=asked) as response:
                    async for line in response.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        if not json.loads(line[6:])["choices"][0]["text"]:
                            continue
                        now_s = time.perf_counter()
                        (first_s if is_first else token_s).append(now_s - last_s)
                        last_s, is_first = now_s, False

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds = time.perf_counter() - start
    change = {name: value - before[name] for name, value in figures(url).items()}
    steps = change["llama_decode_device_seconds_count"]
    return {
        "clients": clients,
        "requests": clients * requests_each,
        "tokens_per_s": change["llama_generated_tokens_total"] / seconds,
        "first_s": spread(first_s),
        "token_s": spread(token_s),
        "host_s": change["llama_decode_host_seconds_sum"]
        / max(1, change["llama_decode_host_seconds_count"]),
        "device_s": change["llama_decode_device_seconds_sum"] / steps,
        "steps": steps,
        "compiles": change["llama_compiles"],
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """The median and a high percentile of some times."""
    return {"median": statistics.median(seconds), "p95": statistics.quantiles(seconds, n=20)[-1]}


async def memory_over(url: str, process: psutil.Process, number: int) -> dict[str, Any]:
    """The server's resident memory after each tenth of the requests, the start included."""
    rss = [process.memory_info().rss]
    start = time.perf_counter()
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:

        async def client(numbers: range) -> None:
            for i in numbers:
                asked = {"prompt": [i % VOCAB] * (1 + i % 5), "max_tokens": 1 + i % 3, "seed": i}
                response = await http.post("/v1/completions", json=asked)
                response.raise_for_status()

        for tenth in range(10):
            numbers = range(number * tenth // 10, number * (tenth + 1) // 10)
            await asyncio.gather(*(client(numbers[i :: 2 * SLOTS]) for i in range(2 * SLOTS)))
            rss.append(process.memory_info().rss)
    return {"rss_bytes": rss, "per_s": number / (time.perf_counter() - start)}


if __name__ == "__main__":
    sys.exit(main(args))
