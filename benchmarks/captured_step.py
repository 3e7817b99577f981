"""What does Python do for a captured step, and does it cost more than a jitted jax program's call?

Three steps whose arithmetic is small, so that the host's part shows. AdamW over 100 weights of
16 x 16, forward and backward included, beside the same step as one jitted jax program that takes
over its state; both run in turns in one process on one device, from the same weights, and are
waited for. And a model of equal layers, whose state lies in stacks: how long the call of its
captured step takes until Python is free again, with idle devices. And a token of all slots of the
Llama server, of 24 layers, and of 8 wider ones: layer by layer, and as one loop (`--scan`), in
turns, but for the call, which is measured with the same step before it, as a server has it. CPUs
copy each layer's weights out of their stack in such a loop, and the program has a tenth of the
inputs. XLA runs a program that it takes for cheap inside of the call; these are large enough that
it does not.

Run: python -m benchmarks.captured_step
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.options import whole
from benchmarks.report import Samples, Stopwatch, Table, argument_parser, publish, verdict

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=whole(), default=200, help="steps of each (default 200)")
    args = parser.parse_args()

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import spmd_core as spmd
from examples.llama_serving.programs import Programs
from examples.llama_tp.model import build_model
from examples.llama_tp.presets import ModelPreset

WEIGHTS, SIZE = 100, 16
LAYERS, WIDTH = 12, 32
RATE, DECAY, BETAS, EPS = 1e-3, 1e-2, (0.9, 0.999), 1e-8
MAX_RATIO = 1.2
MAX_HOST_S = 0.3e-3
DECODE = ModelPreset(
    name="decode",
    num_layers=24,
    width=128,
    hidden=256,
    num_heads=2,
    num_kv_heads=2,
    vocab_size=256,
    seq=64,
    batch=1,
    lr=1e-3,
)
WIDE = replace(
    DECODE, name="wide", num_layers=8, width=512, hidden=1024, num_heads=8, num_kv_heads=8
)
SLOTS = 4
MAX_DECODE_S = 0.5e-3
# Relative, after all rounds: the jax program computes the bias corrections in float32, torch in
# float64.
MAX_LOSS_DIFFERENCE = 1e-4
WARM_UP = 6
ONE_BY_ONE, LOOP = "layer by layer", "as one loop"


def ours(initial: list[np.ndarray]) -> Callable[[Any], Any]:
    """The step over the weights, captured."""
    weights = [nn.Parameter(torch.from_numpy(w).to("xla")) for w in initial]
    optimizer = torch.optim.AdamW(
        weights, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )

    @spmd.compile(capture=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.stack([(x @ w).square().mean() for w in weights]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def theirs(initial: list[np.ndarray]) -> Callable[[Any], Any]:
    """The same step as one jitted jax program."""

    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.stack([jnp.mean((x @ w) ** 2) for w in weights]).sum()

    def update(state: Any, x: jax.Array) -> Any:
        weights, first, second, count = state
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        count = count + 1
        b1, b2 = BETAS
        first = [b1 * m + (1 - b1) * g for m, g in zip(first, grads)]
        second = [b2 * v + (1 - b2) * g * g for v, g in zip(second, grads)]
        scale, root = RATE / (1 - b1**count), jnp.sqrt(1 - b2**count)
        weights = [
            w * (1 - RATE * DECAY) - scale * m / (jnp.sqrt(v) / root + EPS)
            for w, m, v in zip(weights, first, second)
        ]
        return (weights, first, second, count), loss

    jitted = jax.jit(update, donate_argnums=0)
    zeros = [jnp.zeros_like(w) for w in initial]
    # Copies, as the program takes over what it gets.
    state = jax.tree.map(jnp.copy, (initial, zeros, zeros, np.float32(0)))

    def step(x: jax.Array) -> jax.Array:
        nonlocal state
        state, loss = jitted(state, x)
        return loss

    return step


class Model(nn.Module):
    """Equal layers, which run as one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return spmd.scan_layers(self.layers, x)


def host_of(call: Callable[[], Any], rounds: int) -> Samples:
    """Seconds of this thread's CPU time in a call; the device is idle before each."""
    found = Samples()
    for number in range(rounds + WARM_UP):
        start = time.thread_time()
        call()
        seconds = time.thread_time() - start
        spmd.sync(wait=True)
        if number >= WARM_UP:
            found.add(seconds)
    return found


def host_of_stacks(rounds: int) -> Samples:
    """Seconds for a captured step whose state is stacked."""
    model = Model().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    @spmd.compile(capture=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(4, WIDTH, device="xla")
    spmd.sync()
    return host_of(lambda: step(x), rounds)


def decoding(preset: ModelPreset, *, scan: bool) -> Callable[[], Any]:
    """A token of all slots of a server's Llama."""
    torch.manual_seed(0)
    model = build_model(preset, vocab_size=preset.vocab_size, positions=preset.seq)
    model = model.eval().requires_grad_(False).to("xla")
    if scan:
        spmd.scan_model(model)
    programs = Programs(model, num_slots=SLOTS, length=preset.seq, mesh=None)
    return programs.decode


@dataclass
class Measured:
    """Seconds of calls.

    Attributes:
        wall: until the device is idle.
        cpu: of all threads, until then.
        host: of the calling thread, until the call returns.
    """

    wall: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)
    host: Samples = field(default_factory=Samples)


def in_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, wait: Callable[[str, Any], None]
) -> tuple[dict[str, Measured], dict[str, Any]]:
    """What calls take, and what the last ones returned, each by name.

    Args:
        calls: by name.
        rounds: calls of each that are measured.
        wait: waits for the device, by a name and what the call returned.
    """
    found, last = {name: Measured() for name in calls}, {}
    for number in range(rounds + WARM_UP):
        for name in list(calls) if number % 2 else reversed(list(calls)):
            with Stopwatch() as watch:
                start = time.thread_time()
                last[name] = calls[name]()
                seconds = time.thread_time() - start
                wait(name, last[name])
            if number >= WARM_UP:
                found[name].wall.add(watch.wall_s)
                found[name].cpu.add(watch.cpu_s)
                found[name].host.add(seconds)
    return found, last


def measured_tokens(
    preset: ModelPreset, rounds: int, wait: Callable[[str, Any], None]
) -> dict[str, Measured]:
    """What a token takes, layer by layer and as one loop."""
    calls = {name: decoding(preset, scan=name == LOOP) for name in (ONE_BY_ONE, LOOP)}
    found, _ = in_turns(calls, rounds, wait)
    for name, call in calls.items():
        found[name].host = host_of(call, rounds)
    return found


def main(rounds: int, folder: Any) -> int:
    spmd.simulate(1)
    rng = np.random.default_rng(0)
    initial = [
        rng.standard_normal((SIZE, SIZE), np.float32) / np.float32(SIZE) for _ in range(WEIGHTS)
    ]
    data = rng.standard_normal((4, SIZE), np.float32)
    x = torch.from_numpy(data).to("xla")
    spmd.sync()
    step, jitted, given = ours(initial), theirs(initial), jax.device_put(data)

    def wait(name: str, result: Any) -> None:
        if name == "jitted":
            result.block_until_ready()
        else:
            spmd.sync(wait=True)

    steps, losses = in_turns(
        {"captured": lambda: step(x), "jitted": lambda: jitted(given)}, rounds, wait
    )
    stacked = host_of_stacks(rounds)
    tokens = {preset: measured_tokens(preset, rounds, wait) for preset in (DECODE, WIDE)}
    ratios = {
        what: statistics.median(
            a / b
            for a, b in zip(
                getattr(steps["captured"], what).values, getattr(steps["jitted"], what).values
            )
        )
        for what in ("wall", "cpu", "host")
    }
    difference = abs(float(losses["captured"]) - float(losses["jitted"]))
    holds = {
        f"at most {MAX_RATIO} of the jitted program's CPU time": ratios["cpu"] <= MAX_RATIO,
        f"at most {MAX_RATIO} of its wall time": ratios["wall"] <= MAX_RATIO,
        f"at most {MAX_HOST_S * 1e3:.1f} ms of the host for stacks": stacked.median <= MAX_HOST_S,
        f"at most {MAX_DECODE_S * 1e3:.1f} ms of the host for a token": (
            tokens[DECODE][LOOP].host.median <= MAX_DECODE_S
        ),
        "the same losses": difference <= MAX_LOSS_DIFFERENCE * float(losses["jitted"]),
    }
    rows = [
        *(
            _row(f"AdamW over {WEIGHTS} weights of {SIZE} x {SIZE}, {name}", of)
            for name, of in steps.items()
        ),
        [f"{LAYERS} equal layers in stacks", "", "", _ms(stacked)],
        *(
            _row(
                f"a token of a Llama of {preset.num_layers} layers, width {preset.width}, {name}",
                of,
            )
            for preset, by_name in tokens.items()
            for name, of in by_name.items()
        ),
    ]
    table = Table(
        "A captured step on the host",
        ["step", "wall time", "CPU time of all threads", "CPU time of the call"],
        rows,
        [
            f"One device, medians of {rounds} steps, in turns. Captured beside jitted, the median "
            f"of the ratios of neighbours: {ratios['wall']:.2f} of the wall time, "
            f"{ratios['cpu']:.2f} of the CPU time, {ratios['host']:.2f} of that of the call.",
            *(f"{name}: {verdict(of)}" for name, of in holds.items()),
        ],
    )
    found = {
        "rounds": rounds,
        "ratios": ratios,
        "seconds": {name: _values(of) for name, of in steps.items()},
        "stacked_host_s": stacked.values,
        "token_seconds": {
            preset.name: {name: _values(of) for name, of in by_name.items()}
            for preset, by_name in tokens.items()
        },
    }
    publish("captured_step", table, found, folder=folder)
    return 0 if all(holds.values()) else 1


def _values(of: Measured) -> dict[str, list[float]]:
    return {"wall": of.wall.values, "cpu": of.cpu.values, "host": of.host.values}


def _row(name: str, of: Measured) -> list[str]:
    return [name, *map(_ms, (of.wall, of.cpu, of.host))]


def _ms(of: Samples) -> str:
    return f"{of.median * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main(args.rounds, args.out))
