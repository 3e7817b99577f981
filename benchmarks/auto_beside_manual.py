"""The shardings that are found for GPT-2, beside the recipe's that were written by hand.

Over one mesh on eight emulated devices: each parameter's partition spec by `spmd.auto_shard` and by
`examples/gpt2/shardings.py`, with its bytes on a device; the marks of modules' results; and of both
programs the CPU time of a step, in turns, the peak memory and the collectives.

    python -m benchmarks.auto_beside_manual
    python -m benchmarks.auto_beside_manual --mesh fsdp=8 --show
"""

from benchmarks.options import whole
from benchmarks.report import Table, argument_parser, publish

if __name__ == "__main__":  # before the imports below, which take seconds
    parser = argument_parser(__doc__)
    parser.add_argument("--mesh", default="fsdp=4,tensor=2", help="default fsdp=4,tensor=2")
    parser.add_argument("--size", default="small", help="of the model (default: small)")
    parser.add_argument("--rounds", type=whole(), default=6, help="of turns (default 6)")
    parser.add_argument("--candidates", type=whole(), default=6, help="to compile (default 6)")
    parser.add_argument("--show", action="store_true", help="print the table, write no files")
    args = parser.parse_args()

import gc
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import spmd_core as spmd
from benchmarks.auto_models import gpt2
from spmd_core.debugging import communication
from spmd_core.program import compile_cache
from spmd_core.sharding.partition_spec import PartitionSpecLike

AUTO, MANUAL = "found", "by hand"
# Of a turn that count.
STEPS = 3
# XLA's worker threads spin for a while after their work, which would count as the next step's.
SETTLE_S = 0.1


@dataclass
class Trained:
    """A model under one way of sharding.

    Attributes:
        run: runs a step.
        specs: of each parameter.
        shapes: of each parameter.
        bytes: of each parameter on a device.
        results: of each module whose result is marked.
        peak_bytes: of the step's program.
        sent: the bytes that a device sends in a step, by kind of collective.
        counts: how many collectives run in a step, by kind.
    """

    run: Callable[[], Any]
    specs: dict[str, PartitionSpecLike]
    shapes: dict[str, tuple[int, ...]]
    bytes: dict[str, int]
    results: dict[str, PartitionSpecLike]
    peak_bytes: int
    sent: dict[str, float]
    counts: Counter[str]


def trained(way: str) -> Trained:
    """GPT-2 after three steps under one way of sharding."""
    torch.manual_seed(0)
    model, _, step, inputs = gpt2.build(args.size, "xla")
    mesh = spmd.parse_mesh(args.mesh, spmd.global_runtime_device_count())
    if way == AUTO:
        spmd.sync(wait=True)
        spmd.auto_shard(step, *inputs, mesh=mesh, candidates=args.candidates, objective="measured")
    else:
        gpt2.by_marks(model, inputs, mesh)
        spmd.sync(wait=True)
    results: dict[str, PartitionSpecLike] = {}
    hooks = [
        module.register_forward_hook(_noted(name, results))
        for name, module in model.named_modules()
    ]
    before = {id(x): x.record.executions for x in compile_cache.programs()}

    def run() -> None:
        step(*inputs)
        spmd.sync(wait=True)

    run()
    for hook in hooks:
        hook.remove()
    run()
    run()
    ran = [x for x in compile_cache.programs() if x.record.executions > before.get(id(x), 0)]
    program = max(ran, key=lambda x: x.record.executions - before.get(id(x), 0))
    sent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for one in communication.of_program(program):
        times = one.executions or 1
        sent[one.kind] += one.moved_bytes * times
        counts[one.kind] += times
    parameters = dict(model.named_parameters())
    return Trained(
        run,
        {name: _spec(p) for name, p in parameters.items()},
        {name: tuple(p.shape) for name, p in parameters.items()},
        {name: _bytes(p) for name, p in parameters.items()},
        results,
        program.record.peak_bytes,
        sent,
        counts,
    )


def _noted(name: str, results: dict[str, PartitionSpecLike]) -> Callable[..., None]:
    """A hook that notes how a module's result is marked, after the hooks that mark it."""

    def hook(module: nn.Module, inputs: Any, result: Any) -> None:
        first = result[0] if isinstance(result, (tuple, list)) else result
        spec = getattr(first, "partition_spec", None)
        if spec is not None:
            results[name] = spec

    return hook


def _spec(parameter: Any) -> PartitionSpecLike:
    """A parameter's partition spec, also of one that is whole without a mark."""
    found: PartitionSpecLike = parameter.partition_spec or (None,) * parameter.dim()
    return found


def _bytes(parameter: nn.Parameter) -> int:
    shards = spmd.to_jax(parameter.detach()).addressable_shards
    return int(shards[0].data.nbytes)


def folded(specs: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """By name with `*` for its numbers, where all that it stands for agree: the spec, the count."""
    by_pattern: dict[str, list[str]] = {}
    for name in specs:
        by_pattern.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    found = {}
    for pattern, names in by_pattern.items():
        if len({specs[name] for name in names}) == 1:
            found[pattern] = specs[names[0]], len(names)
        else:
            found |= {name: (specs[name], 1) for name in names}
    return found


def _rows(ways: dict[str, Trained]) -> list[list[str]]:
    found, manual = ways[AUTO], ways[MANUAL]
    both = {
        name: (found.specs[name], manual.specs[name], found.bytes[name], manual.bytes[name])
        for name in manual.specs
    }
    rows = []
    for name, ((own, by_hand, size, size_by_hand), count) in folded(both).items():
        one = next(n for n in found.shapes if re.sub(r"\d+", "*", n) == name or n == name)
        rows.append(
            [
                name.removeprefix("transformer.") + (f" x{count}" if count > 1 else ""),
                str(list(found.shapes[one])),
                _text(own),
                "same" if own == by_hand else _text(by_hand),
                f"{size * count / 1e3:,.1f} kB",
                f"{size_by_hand * count / 1e3:,.1f} kB",
            ]
        )
    return rows


def _text(spec: PartitionSpecLike) -> str:
    return "whole" if all(x is None for x in spec) else repr(spec)


def _results_text(way: Trained) -> str:
    text = ", ".join(
        f"{name.removeprefix('transformer.')}{f' x{count}' if count > 1 else ''} {_text(spec)}"
        for name, (spec, count) in folded(way.results).items()
    )
    return text or "none"


def _moved_text(way: Trained) -> str:
    kinds = (
        f"{way.counts[kind]} {kind} of {x / 1e6:,.1f} MB" for kind, x in sorted(way.sent.items())
    )
    return ", ".join(kinds)


def main() -> None:
    spmd.config.cache_dir = None  # an equal search would be read from there
    spmd.simulate(8)
    spmd.use_spmd()
    ways: dict[str, Trained] = {}
    for name in (AUTO, MANUAL):
        ways[name] = trained(name)
        gc.collect()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds):
        turns = list(ways.items())  # in both orders, as a step leaves caches to the next one
        for name, way in turns if number % 2 else reversed(turns):
            way.run()  # its memory and its caches are new, and it does not count
            for _ in range(STEPS):
                time.sleep(SETTLE_S)
                start = time.process_time()
                way.run()
                times[name].append(time.process_time() - start)
    cpu_s = {name: statistics.median(x) for name, x in times.items()}
    notes = []
    for name, way in ways.items():
        notes += [
            f"{name}: {cpu_s[name] * 1e3:,.0f} ms of CPU time in a step, "
            f"{way.peak_bytes / 1e6:,.1f} MB at peak on a device; a device sends "
            f"{sum(way.sent.values()) / 1e6:,.1f} MB in {way.counts.total()} collectives: "
            f"{_moved_text(way)}.",
            f"{name}, marked results of modules: {_results_text(way)}.",
        ]
    ratio = cpu_s[MANUAL] / cpu_s[AUTO]
    notes.append(f"A step as found runs at {ratio:.2f} of the rate of one by hand.")
    table = Table(
        f"GPT-2 ({args.size}) over {args.mesh}: shardings that are found, and by hand",
        ["parameter", "shape", "found", "by hand", "bytes, found", "bytes, by hand"],
        _rows(ways),
        notes,
    )
    if args.show:
        table.show()
        return
    data = {
        name: {
            "cpu_s": cpu_s[name],
            "peak_bytes": way.peak_bytes,
            "sent": way.sent,
            "counts": way.counts,
            "specs": way.specs,
            "results": way.results,
        }
        for name, way in ways.items()
    }
    publish("auto_beside_manual", table, data, folder=args.out)


if __name__ == "__main__":
    main()
