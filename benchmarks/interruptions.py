"""Is each Ctrl-C one KeyboardInterrupt, and is everything as before after it?

A child process sends SIGINT at random moments, while one of several small programs runs in a loop:
forward, backward, optimizers, composite operations, autocast, checkpointing, reads, compilations,
closures, a loader. Each signal must raise KeyboardInterrupt in the loop, once; none may be printed
as "Exception ignored", end the process, or leave a mode, a lock or a counter changed. What is
recorded loses nothing: a count on the device is that of the loop, or one more. At the end all
programs must compute what eager torch computes.

Run: python -m benchmarks.interruptions [--rounds 500] [--seed 0]
"""

import argparse
import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.prog = "python -m benchmarks.interruptions"
    parser.add_argument("--rounds", type=whole(), default=500, help="interruptions (default 500)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the moments")
    parser.add_argument("--child", action="store_true", help="in this process; prints JSON")
    args = parser.parse_args()

import jax
import torch
from torch.utils import checkpoint

import spmd_core as spmd
import spmd_data
from spmd_core.dispatch import fallback
from spmd_core.graph import recorders

# Reads a delay in seconds, waits, sends the signal, and says so.
_SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(int(sys.argv[1]), signal.SIGINT)
    print(flush=True)
"""
_MOST_DELAY_S = 0.01
_LOST_AFTER_S = 10.0


class Programs:
    """Small programs over a model of their own, on one device; each returns what it computed."""

    def __init__(self, device: str, state: dict[str, torch.Tensor] | None = None) -> None:
        self.device = torch.device(device)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        )
        self.start = copy.deepcopy(model.state_dict())
        self.x = torch.randn(4, 8).to(self.device)
        self.model = model.to(self.device)
        self.optimizers = (
            torch.optim.AdamW(self.model.parameters(), foreach=False),
            torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=True),
        )
        self._sizes = 3

    def reset(self) -> None:
        """The model as at the start."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad()

    def forward(self) -> list[torch.Tensor]:
        return [self.model(self.x)]

    def backward(self) -> list[torch.Tensor]:
        self.model(self.x).square().sum().backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self) -> list[torch.Tensor]:
        for optimizer in self.optimizers:
            optimizer.step()
        return [p.detach() for p in self.model.parameters()]

    def composite(self) -> list[torch.Tensor]:
        x = self.x
        kernel = torch.ones(3, 4, 3, device=self.device)
        return [
            torch.nn.functional.conv1d(x[None].expand(2, 4, 8), kernel),
            torch.einsum("ab,cb->ac", x, x),
            torch.kron(x[:2, :2], x[:2, :2]),
            torch.cdist(x, x),
            torch.nn.functional.cosine_similarity(x, x),
            *torch._foreach_add([x, x], 1.0),
            torch.frexp(x).mantissa,
        ]

    def autocast(self) -> list[torch.Tensor]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16), torch.no_grad():
            return [self.model(self.x).float()]

    def checkpointed(self) -> list[torch.Tensor]:
        x = self.x.detach().requires_grad_()
        checkpoint.checkpoint(self.model, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return [x.grad]

    def read(self) -> list[torch.Tensor]:
        return [torch.tensor(self.x.sum().item())]

    def compiled(self) -> list[torch.Tensor]:
        """Compiles programs of new sizes each time; they leave no result."""
        self._sizes += 1
        ones = torch.ones(self._sizes, 2, device=self.device).cumsum(1)
        spmd.sync()
        return [ones.mean()]

    def closures(self) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        spmd.add_step_closure(seen.append, (self.x * 2,))
        spmd.sync()
        return seen or [self.x * 2]  # the closure runs with a later step, after an interruption

    def loaded(self) -> list[torch.Tensor]:
        batches = [torch.full((4,), float(i)) for i in range(4)]
        if self.device.type == "cpu":
            return batches
        return list(spmd_data.MpDeviceLoader(batches, self.device))


NAMES = (
    "forward", "backward", "step", "composite", "autocast", "checkpointed", "read", "compiled",
    "closures", "loaded",
)  # fmt: skip


def state() -> dict[str, Any]:
    """The modes, locks and counters that an interruption must leave as they are."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("xla"),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "x64": jax.config.values["jax_enable_x64"],
        "graph lock": recorders.lock._is_owned(),  # type: ignore[attr-defined]
        "nesting": +fallback._thread.nesting,
        "trace": sys.gettrace(),
    }


def interrupted(rounds: int, seed: int) -> dict[str, Any]:
    """Interrupts the programs; returns what went wrong, by kind, and how long it took."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spmd.use_spmd()
    programs, eager = Programs("xla"), Programs("cpu")
    for name in NAMES:
        for _ in range(2):
            getattr(programs, name)()
    spmd.sync()
    printed: Counter[str] = Counter()
    sys.unraisablehook = lambda it: printed.update([f"{it.exc_type.__name__} in {it.object!r}"])
    wrong: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    order = random.Random(seed)
    tally, count = torch.zeros((), device="xla"), 0
    before = state()
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", _SENDER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        for _ in range(rounds):
            name = order.choice(NAMES)
            run: Callable[[], Any] = getattr(programs, name)
            until = time.monotonic() + _LOST_AFTER_S
            try:
                print(order.uniform(0, _MOST_DELAY_S), file=sender.stdin, flush=True)
                while time.monotonic() < until:
                    run()
                    tally.add_(1)
                    count += 1
            except KeyboardInterrupt:
                hit[name] += 1
            else:
                wrong[f"lost in {name}"] += 1
            sender.stdout.readline()  # a second KeyboardInterrupt for one signal would end this
            after = state()
            wrong.update(f"{k} after {name}" for k in before if before[k] != after[k])
            before = after
            counted = int(tally.item())
            if counted not in (count, count + 1):
                wrong[f"count after {name}"] += 1
            count = counted
        sender.stdin.close()
    took = time.perf_counter() - start
    for name in NAMES:
        for one in (programs, eager):
            one.reset()
            for optimizer in one.optimizers:
                optimizer.state.clear()
            one.backward()
        found, expected = (getattr(one, name)() for one in (programs, eager))
        tolerance = 2e-2 if name == "autocast" else 1e-4
        if len(found) != len(expected) or not all(
            torch.allclose(a.cpu(), b, rtol=tolerance, atol=tolerance)
            for a, b in zip(found, expected)
        ):
            wrong[f"values of {name}"] += 1
    return {"hit": dict(hit), "wrong": dict(wrong), "printed": dict(printed), "took_s": took}


def in_child(rounds: int, seed: int = 0) -> dict[str, Any]:
    """`interrupted` in a process of its own, which may be aborted."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            __spec__.name,
            "--child",
            "--rounds",
            str(rounds),
            "--seed",
            str(seed),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    if done.returncode != 0:
        return {
            "hit": {},
            "wrong": {f"exit code {done.returncode}": 1},
            "printed": {},
            "took_s": 0.0,
            "errors": done.stderr,
        }
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(args: argparse.Namespace) -> int:
    if args.child:
        print(json.dumps(interrupted(args.rounds, args.seed)))
        return 0
    result = in_child(args.rounds, args.seed)
    print(result.get("errors", ""), file=sys.stderr)
    hit = result["hit"]
    table = Table(
        f"{args.rounds} interruptions at random moments",
        ("program", "interruptions that were raised"),
        [[name, str(hit.get(name, 0))] for name in NAMES],
        [
            f"Raised once each: {sum(hit.values())} of {args.rounds}, in {result['took_s']:.0f} s.",
            f"Printed and lost: {result['printed'] or 0}. Otherwise wrong: {result['wrong'] or 0}.",
        ],
    )
    publish("interruptions", table, result, folder=args.out)
    is_right = not result["wrong"] and not result["printed"]
    return 0 if is_right and sum(hit.values()) == args.rounds else 1


if __name__ == "__main__":
    sys.exit(main(args))
