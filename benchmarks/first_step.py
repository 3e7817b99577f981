"""How long does it take from the start of a process until its first loss is known?

GPT-2 on emulated devices, one step, with an empty cache of compiled
programs, and with a full one. The time counts everything: Python's imports, the text, the model,
recording, lowering, compiling and the step.

Run: python -m benchmarks.first_step --rounds 2
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import trange

from benchmarks.options import num_devices, whole
from benchmarks.report import Samples, Table, argument_parser, publish
from examples.gpt2.presets import PRESETS

IMPORTS = "import torch, spmd_core, transformers; torch.ones(1)"


def run(preset: str, devices: int, cache: Path, folder: Path) -> dict[str, Any]:
    """Seconds of one training process, and those of them that compiling took."""
    results = folder / "report.json"
    command = [sys.executable, "-m", "examples.gpt2.train", "--preset", preset, "--steps", "1"]
    command += ["--eval-batches", "0", "--max-mb", "1", "--no-progress", "--results", str(results)]
    command += ["--devices", str(devices), "--mesh", f"fsdp={devices}"]
    env = {**os.environ, "SPMD_CACHE_DIR": str(cache)}
    seconds = _seconds(command, env)
    return {"all": seconds, "compiling": json.loads(results.read_text())["compile_s"]}


def _seconds(command: list[str], env: dict[str, str] | None = None) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="of examples.gpt2.train (default tiny)"
    )
    parser.add_argument(
        "--devices", type=num_devices(), default=4, help="emulated devices (default 4)"
    )
    parser.add_argument("--rounds", type=whole(), default=2, help="runs of each kind (default 2)")
    args = parser.parse_args()
    found: dict[str, Samples] = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, Samples()).add(seconds)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in trange(args.rounds, desc="rounds", disable=None):
            add("imports", _seconds([sys.executable, "-c", IMPORTS]))
            cache = folder / f"cache-{number}"
            for kind in ("empty cache", "full cache"):
                for what, seconds in run(args.preset, args.devices, cache, folder).items():
                    add(f"{kind}: {what}", seconds)
    rows = [[name, f"{s.median:.1f} s", f"{s.min:.1f} s"] for name, s in found.items()]
    table = Table(
        f"The first step of GPT-2 {args.preset}, fsdp={args.devices}",
        ["seconds of", "median", "min"],
        rows,
        ["Compiling is XLA's time, or that of reading the cache. Imports are in all."],
    )
    publish(
        "first_step", table, {"seconds": {n: s.values for n, s in found.items()}}, folder=args.out
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
