"""How fast does the Llama server answer many clients, and is its memory flat over many requests?

The server is `python -m examples.llama_serving.serve`, in a process of its own, with a random model
and a tokenizer of one character for each token. Clients stream over HTTP: each asks for a text
again and again until its share of the requests is done. A second server records its steps
(`--no-capture`), and both are asked in turns. Time to the first token and from a token to
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
    parser.add_argument("--rounds", type=whole(), default=3, help="turns of each (default 3)")
    parser.add_argument(
        "--tiny",
        type=whole(0),
        default=10_000,
        help="tiny requests for the memory (default 10,000); 0: none; results are serving_turns.*",
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


CAPTURED, RECORDED = "captured", "recorded"


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), width=args.width, layers=args.layers)
        with (
            server(folder, args.devices) as (captured, _),
            server(folder, args.devices, "--no-capture") as (recorded, _),
        ):
            urls = {CAPTURED: captured, RECORDED: recorded}
            runs = [in_turns(urls, clients, args.rounds) for clients in args.clients]
            compiles = figures(captured)["llama_compiles"]
    rows = [row(run[CAPTURED], run[RECORDED]) for run in runs]
    every = [one for run in runs for one in run[CAPTURED]]
    hidden = all(one["host_s"] < one["device_s"] for one in every)
    tiny = tiny_requests(args) if args.tiny else None
    compiled = sum(one["compiles"] for one in every) + (tiny["compiles"] if tiny else 0)
    flat = tiny is None or tiny["growth_bytes"] <= MAX_GROWTH_BYTES
    notes = [
        f"A Llama of {args.layers} layers, width {args.width}, in float32, tensor={args.devices} "
        f"on emulated devices, {SLOTS} slots of {LENGTH} tokens; prompts of {PROMPT_TOKENS}, "
        f"answers of {ANSWER_TOKENS} tokens, at temperature 1. Clients, servers and devices "
        f"share the cores of one machine. Medians of {args.rounds} turns; of pairs of figures, "
        "the second one is that of a server that records each step.",
        f"{verdict(compiled == 0)}: no request compiled anything; {compiles:.0f} programs at the "
        "start.",
        f"{verdict(hidden)}: the host's part of a decode step, in CPU time, is smaller than the "
        "device's.",
    ]
    if tiny is not None:
        rss = tiny["rss_bytes"]
        notes.append(
            f"{verdict(flat)}: over {args.tiny:,} tiny requests, {tiny['per_s']:.0f} a second, the "
            f"server's memory grew by {tiny['growth_bytes'] / 1e6:.1f} MB after the first tenth, "
            f"from {rss[1] / 1e6:.0f} MB."
        )
    columns = ["clients", "tokens/s", "ratio", "first token, median", "p95", "next token, median"]
    columns += ["p95", "host, a step", "device, a step"]
    options = {name: value for name, value in vars(args).items() if name != "out"}
    found = [
        {"clients": clients, "compiles": sum(one["compiles"] for one in run[CAPTURED]), **run}
        for clients, run in zip(args.clients, runs)
    ]
    data = {"options": options, "runs": found, "memory": tiny}
    name = "serving" if args.tiny else "serving_turns"
    publish(name, Table("Serving a Llama", columns, rows, notes), data, folder=args.out)
    return 0 if hidden and flat and compiled == 0 else 1


def tiny_requests(args: argparse.Namespace) -> dict[str, Any]:
    """The memory of a small model's server over many requests, and what they compiled."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), width=64, layers=2)
        with server(folder, args.devices) as (url, process):
            at_start = figures(url)["llama_compiles"]
            memory = asyncio.run(memory_over(url, process, args.tiny))
            memory["compiles"] = figures(url)["llama_compiles"] - at_start
    memory["growth_bytes"] = memory["rss_bytes"][-1] - memory["rss_bytes"][1]
    return memory


def in_turns(urls: dict[str, str], clients: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The figures of so many clients at each server, which are asked in turns."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in urls}
    for number in range(rounds):
        for kind in (CAPTURED, RECORDED) if number % 2 else (RECORDED, CAPTURED):
            found[kind].append(asyncio.run(measured(urls[kind], clients)))
    return found


def row(mine: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """A line of the table, of medians.

    Args:
        mine: of the server whose steps are captured.
        other: of the one that records them.
    """

    def of(runs: list[dict[str, Any]], name: str, part: str = "") -> float:
        return statistics.median(run[name][part] if part else run[name] for run in runs)

    ratio = of(mine, "tokens_per_s") / of(other, "tokens_per_s")
    return [
        str(mine[0]["clients"]),
        f"{of(mine, 'tokens_per_s'):.0f}, {of(other, 'tokens_per_s'):.0f}",
        f"{ratio:.2f}",
        *(
            f"{1e3 * of(mine, name, part):.0f} ms"
            for name in ("first_s", "token_s")
            for part in ("median", "p95")
        ),
        f"{1e3 * of(mine, 'host_s'):.1f}, {1e3 * of(other, 'host_s'):.1f} ms",
        f"{1e3 * of(mine, 'device_s'):.1f}, {1e3 * of(other, 'device_s'):.1f} ms",
    ]


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
def server(folder: str, devices: int, *options: str) -> Any:
    """A running server with some more options: its address and its process."""
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
    command += options
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
